from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from layers.cases import Case, each_case
from rkfac.layers import Adapter, Uncovered, adapter_for


class Kept(nn.Linear):
    """A subclass in name alone."""


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Standardised(nn.Conv2d):
    """Overrides what Conv2d.forward calls, not forward itself."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None]


def patched() -> nn.Module:
    module = nn.Linear(3, 2)
    module.forward = lambda x: nn.functional.linear(x, module.weight.abs())  # type: ignore[method-assign]
    return module


@each_case
def test_every_case_is_covered(case: Case) -> None:
    assert isinstance(adapter_for(case.module()), Adapter)


def test_a_subclass_that_kept_forward_is_covered() -> None:
    assert adapter_for(Kept(3, 2)) is adapter_for(nn.Linear(3, 2))


@pytest.mark.parametrize(
    "module, reason",
    [
        (Doubled(3, 2), "Doubled overrides forward of Linear"),
        (Standardised(3, 2, 1), "Standardised overrides _conv_forward of Conv2d"),
        (OwnNorm(3), "OwnNorm overrides forward of BatchNorm2d"),
        (patched(), "overrides forward"),
        (parametrizations.weight_norm(nn.Linear(3, 2)), "not a plain parameter"),
        (parametrizations.spectral_norm(nn.Conv2d(3, 2, 1)), "not a plain parameter"),
        (nn.LayerNorm(3, elementwise_affine=False), "not a plain parameter"),
        (nn.BatchNorm1d(3, affine=False), "not a plain parameter"),
        (nn.Embedding(3, 2, sparse=True), "sparse"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.LazyLinear(2), "not initialised"),
        (nn.LazyConv2d(2, 3), "not initialised"),
        (nn.LazyBatchNorm1d(), "not initialised"),
        (nn.ConvTranspose2d(3, 2, 1), "no adapter for ConvTranspose2d"),
        (nn.Bilinear(3, 2, 1), "no adapter for Bilinear"),
        (nn.EmbeddingBag(3, 2), "no adapter for EmbeddingBag"),
        (nn.LSTM(3, 2), "no adapter for LSTM"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_is_not_covered_says_why(module: nn.Module, reason: str) -> None:
    found = adapter_for(module)
    assert isinstance(found, Uncovered)
    assert reason in found.reason


def test_a_lazy_module_is_covered_once_it_knows_its_shape() -> None:
    module = nn.LazyLinear(2)
    module(torch.zeros(1, 3))
    assert isinstance(adapter_for(module), Adapter)


def test_a_parametrized_bias_is_no_bias_to_the_adapter() -> None:
    module = nn.Linear(3, 2)
    parametrize.register_parametrization(module, "bias", nn.Tanh())
    adapter = adapter_for(module)
    assert isinstance(adapter, Adapter)
    assert not adapter.has_bias(module)

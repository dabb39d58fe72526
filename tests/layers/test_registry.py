from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from layers.cases import Case, each_case
from layers.lookalikes import Conv1D, OwnRMSNorm, ScaleNorm, ShiftedRMSNorm
from rkfac.layers import Adapter, Uncovered, adapter_for, uses_of
from rkfac.layers.norm import RMSLikeAdapter


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


class WithBuffer(OwnRMSNorm):
    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(()))


class MeanNorm(OwnRMSNorm):
    """Subtracts the mean too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEpsNorm(OwnRMSNorm):
    """The eps stands outside of the root: the same for ordinary inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class HiddenEpsNorm(OwnRMSNorm):
    """Its eps is nowhere to be found."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)


class NoisyNorm(OwnRMSNorm):
    """Another forward while training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class BrokenNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


class Squared(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


def wrong_shape() -> nn.Module:
    module = Conv1D(3, 4)
    module.weight = nn.Parameter(torch.randn(3, 4))
    return module


@each_case
def test_every_case_is_covered(case: Case) -> None:
    assert isinstance(adapter_for(case.module()), Adapter)


def test_a_conv1d_that_does_not_say_its_inputs_is_covered() -> None:
    module = Conv1D(3, 4)
    del module.nx
    assert adapter_for(module) is adapter_for(Conv1D(3, 4))


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
        (WithBuffer(), "no adapter for WithBuffer"),
        (MeanNorm(4), "MeanNorm: its forward is not x / sqrt"),
        (OtherEpsNorm(4, 1e-3), "OtherEpsNorm: its forward is not x / sqrt"),
        (HiddenEpsNorm(4, 1e-3), "HiddenEpsNorm: its forward is not x / sqrt"),
        (NoisyNorm(4), "NoisyNorm: its forward is not x / sqrt"),
        (BrokenNorm(4), "could not be tried (RuntimeError: needs a GPU)"),
        (OwnRMSNorm(4).to("meta"), "meta device"),
        (Squared(3, 4), "Squared overrides forward of Conv1D"),
        (wrong_shape(), "nx=4 and nf=3"),
        (nn.MultiheadAttention(4, 2), "no adapter for MultiheadAttention"),
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


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("build", [OwnRMSNorm, ShiftedRMSNorm])
def test_the_eps_of_a_norm_is_the_one_its_forward_has(build: type[OwnRMSNorm], eps: float) -> None:
    adapter = adapter_for(build(5, eps))
    assert isinstance(adapter, RMSLikeAdapter)
    assert adapter.eps == eps


def test_a_norm_without_eps_whose_scales_have_another_name() -> None:
    module = ScaleNorm(4).double()
    adapter = adapter_for(module)
    assert isinstance(adapter, RMSLikeAdapter)
    assert (adapter.weight_name, adapter.eps) == ("scale", 0.0)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    x[0, 0] = 0.0  # nothing to normalise
    y = module(x)
    g = torch.randn_like(y)
    y.backward(g)
    torch.testing.assert_close(adapter.gradient(module, x, g), module.scale.grad)


def test_trying_a_forward_changes_neither_the_module_nor_anybodys_random_numbers() -> None:
    module = NoisyNorm(4).eval()
    before, weight = torch.get_rng_state(), module.weight.detach().clone()
    adapter_for(module)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.weight, weight)
    assert not module.training


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {"a": "in_proj_weight", "a.out_proj": "weight"}),
        ({"bias": False}, {"a": "in_proj_weight", "a.out_proj": "weight"}),
        (
            {"kdim": 3, "vdim": 5},
            {f"a.{part}_proj_weight": f"{part}_proj_weight" for part in "qkv"} | {"a.out_proj": "weight"},
        ),
    ],
)
def test_an_attention_layer_has_a_use_for_each_projection(options: dict[str, Any], expected: dict[str, str]) -> None:
    module = nn.MultiheadAttention(4, 2, **options)
    uses = uses_of("a", module)
    assert {name: use.adapter.weight_name for name, use in uses.items()} == expected
    assert all(use.called is module for use in uses.values())
    alone = uses_of("", module)
    assert set(alone) == {name.removeprefix("a").removeprefix(".") for name in expected}


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x)[0]


def test_attention_with_another_forward_or_made_up_weights_is_refused_by_name() -> None:
    (refused,) = uses_of("a", OwnAttention(4, 2)).values()
    assert refused == Uncovered("OwnAttention overrides forward of MultiheadAttention")
    module = nn.MultiheadAttention(4, 2)
    parametrizations.weight_norm(module, "in_proj_weight")
    parametrizations.spectral_norm(module.out_proj)
    assert all("not a plain parameter" in use.reason for use in uses_of("a", module).values())


class PictureNorm(OwnRMSNorm):
    """The last dimension of tokens, the channels of pictures."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("width", [2, 3, 6])
def test_a_norm_that_treats_pictures_otherwise_is_left_alone(width: int) -> None:
    found = adapter_for(PictureNorm(width))
    assert isinstance(found, Uncovered)
    assert "PictureNorm" in found.reason
    assert isinstance(adapter_for(OwnRMSNorm(width)), RMSLikeAdapter)

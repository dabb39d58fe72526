"""Factors of convolutions are the same with and without patches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from curvature.brute import kfac, losses
from rkfac.curvature import moment as moment_module
from rkfac.layers import autocorrelation, conv

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
SMALL, LARGE = (4, 2, 3, 2), (3, 2, 8, 7)


def model_of(dtype: torch.dtype, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Conv2d(2, 3, 3, padding=1, bias=bias), nn.Tanh(), nn.Conv2d(3, 2, (2, 1), dilation=2, padding=1)
    return nn.Sequential(*layers).to(dtype)


def input_factors(model: nn.Sequential, steps: Sequence[Sequence[Tensor]], loss_scale: float = 1.0) -> list[Tensor]:
    """After some steps of some accumulated batches each."""
    optimizer = kfac(model, factor_decay=0.5, lr=0.0)
    for batches in steps:
        optimizer.zero_grad()
        for x in batches:
            (losses(model(x)).mean() * loss_scale).backward()
        optimizer.step()
    return [block.factors["input"].dense() for block in optimizer._blocks.values()]


def batches(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, size: float = 1.0) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(shape, dtype=dtype) * size * 4.0**i for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype, tolerance", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20], ids=["ordinary", "tiny", "huge"])
@pytest.mark.parametrize("shapes", [[LARGE], [SMALL, LARGE, SMALL], [LARGE, SMALL, LARGE]], ids=["one", "up", "down"])
def test_both_ways_give_the_same_factors(
    dtype: torch.dtype,
    tolerance: float,
    bias: bool,
    size: float,
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moment_module, "SMALL", 0)
    steps = [batches(shapes, dtype, size), batches([LARGE], dtype, size)]
    found = []
    for pays in (
        lambda *_: False,
        lambda *_: True,
        lambda samples, channels, axes: axes[0].size > 4,  # both within one moment
    ):
        monkeypatch.setattr(conv, "pays", pays)
        found.append(input_factors(model_of(dtype, bias), steps))
    for other in found[1:]:
        for mine, plain in zip(other, found[0], strict=True):
            unit = plain.abs().amax()
            assert unit > 0
            assert torch.linalg.norm((mine - plain) / unit) <= tolerance * torch.linalg.norm(plain / unit)
            assert torch.equal(mine, mine.mT)


def test_what_is_not_finite_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "pays", lambda *_: True)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Hardtanh())
    (x,) = batches([LARGE], torch.float32)
    before = input_factors(model, [[x]])
    bad = x.clone()
    bad[1, 0, 3, 2] = float("inf")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        after = input_factors(model, [[x], [x, bad]])
    assert any("NaN or Inf" in str(w.message) for w in seen)
    assert torch.equal(before[0], after[0])


def test_inputs_of_zero_are_a_factor_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "pays", lambda *_: True)
    (factor,) = input_factors(nn.Sequential(nn.Conv2d(2, 3, 3, bias=False)), [[torch.zeros(LARGE)]])
    assert not factor.any()


def test_a_paying_layer_makes_no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(16, 4, 3, padding=1))
    x = torch.randn(64, 16, 12, 12)
    optimizer = kfac(model)
    losses(model(x)).mean().backward()  # the first of all compares the gradient with what the calls explain
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(conv, "_patches", None)
    losses(model(x)).mean().backward()
    optimizer.step()
    assert autocorrelation.pays(64, 16, conv._axes(model[0], x))
    assert optimizer._blocks["0"].factors["input"].updates == 2

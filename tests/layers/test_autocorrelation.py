"""The second moment without patches is that of the patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layers.cases import LAST, LAYOUTS, laid_out
from rkfac.layers import KroneckerAdapter, adapter_for, autocorrelation, conv
from rkfac.layers.base import statistics_dtype

MODES = ["zeros", "reflect", "replicate", "circular"]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays or not."""
    monkeypatch.setattr(conv, "pays", lambda *_: True)


def of_rows(module: nn.Module, x: Tensor, bias: bool) -> Tensor:
    """In float64."""
    adapter = adapter_for(module)
    assert isinstance(adapter, KroneckerAdapter)
    rows = [part.double() for part in adapter.input_rows(module, x, bias, "expand")]
    return sum((part.mT @ part for part in rows), torch.zeros(()).double())


def without_rows(module: nn.Module, x: Tensor, bias: bool, unit: float = 1.0) -> Tensor:
    adapter = adapter_for(module)
    assert isinstance(adapter, KroneckerAdapter)
    make = adapter.input_moment(module, x, bias, "expand")
    assert make is not None
    strips = make(torch.tensor(unit, dtype=statistics_dtype(x)))
    d = strips[0].shape[-1]
    found = torch.zeros(d, d, dtype=torch.float64)
    for strip in strips:
        begin = d - strip.shape[1]
        found[begin : begin + strip.shape[0], begin:] = strip
    assert {strip.dtype for strip in strips} == {statistics_dtype(x)}
    return found.triu() + found.triu(1).mT


def assert_equal(module: nn.Module, x: Tensor) -> None:
    tolerance = 1e-10 if x.dtype == torch.float64 else 1e-5
    for bias in (False, True):
        expected = of_rows(module, x, bias)
        difference = torch.linalg.norm(without_rows(module, x, bias) - expected)
        assert difference <= tolerance * torch.linalg.norm(expected), bias


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, Tensor]:
    """Any convolution of one or two dimensions and stride one, on an input of any layout and precision."""
    dims = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation, sizes = each(1, 5), each(1, 3), each(1, 9)
    mode = draw(st.sampled_from(MODES))
    padding = draw(st.just("same") | st.just(each(0, 3)))
    span = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    least = [s + 1 for s in span] if mode != "zeros" or padding == "same" else [1] * dims
    most = [0 if padding == "same" else p for p in (padding if padding != "same" else [0] * dims)]
    sizes = tuple(
        max(size, low, p + 1 if mode != "zeros" else 1, s + 1 - 2 * p if padding != "same" else 1)
        for size, low, p, s in zip(sizes, least, most, span, strict=True)
    )
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    kind, channels = (nn.Conv1d if dims == 1 else nn.Conv2d), draw(st.sampled_from([1, 3, 17]))
    module = kind(channels, 2, kernel, padding=padding, dilation=dilation, padding_mode=mode)
    x = torch.randn(draw(st.integers(1, 3)), channels, *sizes)
    return module.to(dtype), laid_out(x, draw(st.sampled_from(LAYOUTS))).to(dtype)


@given(convolutions())
def test_it_is_the_moment_of_the_patches(made: tuple[nn.Module, Tensor]) -> None:
    assert_equal(*made)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5, (1, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 4), (7, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_and_odd_images(kernel: Any, size: tuple[int, int], dtype: torch.dtype) -> None:
    module = nn.Conv2d(18, 2, kernel, padding="same").to(dtype)  # wide enough for several strips at 5 x 5
    assert_equal(module, torch.randn(3, 18, *size, dtype=dtype))
    assert_equal(module, torch.randn(3, 18, *size, dtype=dtype).contiguous(memory_format=LAST))
    assert_equal(module, torch.randn(18, *size, dtype=dtype))  # one image, no batch


def test_chunks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocorrelation, "MAX_CHUNK", 1)
    for mode in MODES:
        assert_equal(nn.Conv2d(3, 2, 3, padding=1, padding_mode=mode).double(), torch.randn(5, 3, 6, 5).double())


def test_a_unit_multiplies_patches_and_the_bias_alike() -> None:
    module, x = nn.Conv2d(3, 2, 3, padding=1).double(), torch.randn(5, 3, 6, 5).double()
    torch.testing.assert_close(without_rows(module, x, True, unit=0.25), of_rows(module, x, True) / 16)


def test_a_large_border_costs_the_inside_no_digits() -> None:
    """What a window lacks is never subtracted."""
    module, x = nn.Conv2d(2, 2, 3, bias=False), torch.randn(4, 2, 9, 9)
    x[:, :, 0] *= 1e6
    found, expected = without_rows(module, x, False), of_rows(module, x, False)
    last = [6, 7, 8, 15, 16, 17]  # taps of the third row never see the first one
    inside, wanted = found[last][:, last], expected[last][:, last]
    assert torch.linalg.norm(inside - wanted) <= 1e-5 * torch.linalg.norm(wanted)


@pytest.mark.parametrize("channels", [3, 8, 16, 64])
def test_many_samples_cost_no_digits(channels: int) -> None:
    assert_equal(nn.Conv2d(channels, 2, 3, padding=1), torch.randn(256, channels, 16, 16))


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 3, groups=2), nn.Conv3d(4, 4, 3)],
    ids=["stride", "groups", "3-D"],
)
def test_others_have_rows_only(module: nn.Module) -> None:
    adapter = adapter_for(module)
    assert isinstance(adapter, KroneckerAdapter)
    assert adapter.input_moment(module, torch.randn(2, 4, *[9] * len(module.kernel_size)), True, "expand") is None
    plain = nn.Conv2d(4, 4, 3)
    assert adapter.input_moment(plain, torch.randn(2, 4, 9, 9), True, "reduce") is None


def plane(size: int, kernel: int) -> tuple[autocorrelation.Axis, autocorrelation.Axis]:
    axis = autocorrelation.Axis(size, kernel, 1, kernel // 2, size)
    return axis, axis


def test_it_pays_for_large_images_and_batches_only() -> None:
    assert autocorrelation.pays(32, 64, plane(32, 3))
    assert autocorrelation.pays(256, 512, plane(4, 3))
    assert not autocorrelation.pays(8, 512, plane(4, 3))
    assert not autocorrelation.pays(32, 8, plane(8, 3))
    assert not autocorrelation.pays(256, 64, plane(32, 1))  # patches of one tap are the input itself

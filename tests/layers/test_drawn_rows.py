"""Rows that were drawn are those rows of the whole, and nothing but them is ever made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from layers.cases import CASES, LAYOUTS, Case, each_case, laid_out
from rkfac.layers import KroneckerAdapter, UnitAdapter, adapter_for, conv
from rkfac.layers.base import by_position

each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])
MODES = ["zeros", "reflect", "replicate", "circular"]


def called(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    module, x = case.module(), case.x()
    return module, x, torch.randn_like(module(x))


@each_case
@each_sharing
def test_drawn_rows_are_those_rows_of_the_whole(case: Case, sharing: str) -> None:
    module, x, g = called(case)
    adapter = adapter_for(module)
    assert isinstance(adapter, KroneckerAdapter | UnitAdapter)
    n = adapter.count(module, g, sharing)
    if n == 1:
        return  # nothing to draw
    drawn = torch.randperm(n)[: n // 2]
    if isinstance(adapter, UnitAdapter):
        whole = adapter.unit_gradients(module, x, g, sharing)
        assert whole.shape[0] == n
        torch.testing.assert_close(adapter.unit_gradients(module, x, g, sharing, drawn), whole[drawn])
        return
    G = adapter.output_rows(module, x, g, sharing)
    assert G.shape[-2] == n
    torch.testing.assert_close(adapter.output_rows(module, x, g, sharing, drawn), G[..., drawn, :])
    if adapter.diagonal_input():
        return
    for bias in (False, True):
        A = torch.cat(list(adapter.input_rows(module, x, bias, sharing)), dim=-2)
        (found,) = adapter.input_rows(module, x, bias, sharing, drawn)
        assert A.shape[-2] == n
        torch.testing.assert_close(found, A[..., drawn, :])


@pytest.mark.parametrize("trailing", [1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0)])
def test_rows_by_position_whatever_the_memory(trailing: int, order: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 5, 6).permute(order)
    whole = x.contiguous().flatten(0, 3 - trailing)
    drawn = torch.randperm(len(whole))[:7]
    assert torch.equal(by_position(x, None, trailing), whole)
    assert torch.equal(by_position(x, drawn, trailing), whole[drawn])


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, Tensor]:
    """Any convolution and an input in any memory layout, in float64 or half precision."""
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kernel, dilation = each(1, 3), each(1, 2)
    padding = draw(st.just("same") | st.just(each(0, 2)))
    stride = (1,) * dims if padding == "same" else each(1, 3)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    channels = groups * per_group
    module = kind(
        channels, groups, kernel, stride, padding, dilation, groups, padding_mode=draw(st.sampled_from(MODES))
    )
    x = torch.randn(draw(st.integers(1, 3)), channels, *(s + 5 for s in each(0, 2)))
    return module.to(dtype), laid_out(x, draw(st.sampled_from(LAYOUTS))).to(dtype)


@given(convolutions(), st.randoms(use_true_random=False))
def test_gathered_patches_are_rows_of_the_unfolding(made: tuple[nn.Module, Tensor], random: Any) -> None:
    module, x = made
    adapter, g = adapter_for(module), module(x)
    assert isinstance(adapter, KroneckerAdapter)
    (whole,) = adapter.input_rows(module, x, True, "expand")
    n = adapter.count(module, g, "expand")
    assert whole.shape[-2] == n
    drawn = torch.tensor(random.sample(range(n), random.randint(1, n)))
    (found,) = adapter.input_rows(module, x, True, "expand", drawn)
    assert torch.equal(found, whole[..., drawn, :])
    assert found.dtype == whole.dtype
    G = adapter.output_rows(module, x, g, "expand")
    assert torch.equal(adapter.output_rows(module, x, g, "expand", drawn), G[..., drawn, :])


def test_padding_is_zero_beside_what_is_not_finite() -> None:
    module = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    x = torch.full((1, 1, 3, 3), torch.nan)
    x[0, 0, 2, 2] = 1.0
    (found,) = adapter_for(module).input_rows(module, x, False, "expand", torch.tensor([0]))
    outside = torch.tensor([True, True, True, True, False, False, True, False, False])
    assert torch.equal(found[0].isnan(), ~outside)
    assert not found[0][outside].any()


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("conv2d")], ids=lambda c: c.name)
def test_chunks_do_not_change_drawn_patches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, g = called(case)
    adapter = adapter_for(module)
    drawn = torch.randperm(adapter.count(module, g, "expand"))[:5]
    (whole,) = adapter.input_rows(module, x, True, "expand", drawn)
    monkeypatch.setattr(conv, "MAX_CHUNK", 1)
    parts = list(adapter.input_rows(module, x, True, "expand", drawn))
    assert len(parts) == 5
    assert torch.equal(torch.cat(parts, dim=-2), whole)


class Largest(TorchDispatchMode):
    """The most elements that any operation made anew."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.elements = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in self._known:
            self.elements = max(self.elements, made.numel())
        return made


LARGE = {
    "conv2d": (lambda: nn.Conv2d(8, 6, 3, padding=1), (16, 8, 12, 12), 8 * 9 + 1),
    "conv2d reflect": (lambda: nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect"), (16, 8, 12, 12), 8 * 9 + 1),
    "linear": (lambda: nn.Linear(20, 6), (16, 30, 20), 21),
    "linear half": (lambda: nn.Linear(20, 6).bfloat16(), (16, 30, 20), 21),
    "layernorm": (lambda: nn.LayerNorm(20), (16, 30, 20), 40),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_nothing_larger_than_the_drawn_rows_is_made(name: str, layout: str) -> None:
    build, shape, width = LARGE[name]
    module = build()
    x = torch.randn(shape, dtype=module.weight.dtype)
    if layout == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    g = torch.randn_like(module(x))
    adapter, drawn = adapter_for(module), torch.tensor([0, 3, 200, 479])
    with torch.no_grad(), Largest(x, g) as largest:
        if isinstance(adapter, UnitAdapter):
            adapter.unit_gradients(module, x, g, "expand", drawn)
        else:
            adapter.output_rows(module, x, g, "expand", drawn)
            list(adapter.input_rows(module, x, True, "expand", drawn))
    assert 0 < largest.elements <= len(drawn) * width < x.numel()

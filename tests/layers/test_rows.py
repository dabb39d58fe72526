"""Sum of g (x) a over batch and positions is autograd's gradient, for every adapter and every option of its layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layers.cases import CASES, Case, each_case
from rkfac.layers import KroneckerAdapter, UnitAdapter, adapter_for, conv

CONVOLUTIONS = [c for c in CASES if c.name.startswith("conv")]
SHARED = [c for c in CASES if c.name.startswith(("conv", "linear", "transposed")) and "unbatched" not in c.name]


def differentiated(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """A module whose parameters hold autograd's gradients, its input and the gradient at its output."""
    module, x = case.module(), case.x()
    y = module(x)
    g = torch.randn_like(y)
    y.backward(g)
    return module, x, g


def joined(adapter: KroneckerAdapter, module: nn.Module, x: Tensor, sharing: str = "expand") -> Tensor:
    return torch.cat(list(adapter.input_rows(module, x, adapter.has_bias(module), sharing)), dim=-2)


@each_case
def test_the_sum_over_rows_is_autograds_gradient(case: Case) -> None:
    module, x, g = differentiated(case)
    adapter = adapter_for(module)
    if isinstance(adapter, UnitAdapter):
        found = adapter.unit_gradients(module, x, g, "expand").sum(0)
        gradients = [module.weight.grad, module.bias.grad] if adapter.has_bias(module) else [module.weight.grad]
        torch.testing.assert_close(found, torch.stack([t.flatten() for t in gradients], dim=-1))
        return
    assert isinstance(adapter, KroneckerAdapter)
    G = adapter.output_rows(module, x, g, "expand")
    if adapter.diagonal_input():
        A = nn.functional.one_hot(x.flatten(), module.num_embeddings).to(G)
    else:
        A = joined(adapter, module, x)
    J = G.mT @ A
    if adapter.has_bias(module):
        torch.testing.assert_close(J[..., -1], adapter.vector(module, module.bias.grad))
        J = J[..., :-1]
    torch.testing.assert_close(J, adapter.matrix(module, module.weight.grad))


@each_case
def test_the_declared_factor_shapes_are_those_of_the_rows(case: Case) -> None:
    module, x, g = differentiated(case)
    adapter = adapter_for(module)
    if isinstance(adapter, UnitAdapter):
        units = adapter.unit_gradients(module, x, g, "expand").shape
        assert units[1:] == (module.weight.numel(), 1 + adapter.has_bias(module))
        return
    assert isinstance(adapter, KroneckerAdapter)
    G = adapter.output_rows(module, x, g, "expand")
    assert (*G.shape[:-2], G.shape[-1]) == adapter.output_shape(module)
    if not adapter.diagonal_input():
        A = joined(adapter, module, x)
        assert (*A.shape[:-2], A.shape[-1]) == adapter.input_shape(module, adapter.has_bias(module))
        assert A.shape[-2] == G.shape[-2]
    assert adapter.matrix(module, module.weight).shape[:-1] == adapter.output_shape(module)


@pytest.mark.parametrize("case", [c for c in CASES if "embedding" in c.name], ids=lambda c: c.name)
def test_an_embeddings_diagonal_counts_lookups(case: Case) -> None:
    module, x = case.module(), case.x()
    (counts,) = adapter_for(module).input_rows(module, x, False, "expand")
    one_hot = nn.functional.one_hot(x.flatten(), module.num_embeddings).double()
    if module.padding_idx is not None:
        one_hot[:, module.padding_idx] = 0
    assert (counts > 1).any()
    torch.testing.assert_close(torch.diag(counts), one_hot.mT @ one_hot)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda c: c.name)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_chunks_do_not_change_the_rows(case: Case, sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = case.module(), case.x()
    adapter = adapter_for(module)
    whole = list(adapter.input_rows(module, x, True, sharing))
    assert len(whole) == 1
    monkeypatch.setattr(conv, "MAX_CHUNK", 1)
    parts = list(adapter.input_rows(module, x, True, sharing))
    assert len(parts) == (1 if "unbatched" in case.name else case.shape[0])
    assert torch.equal(torch.cat(parts, dim=-2), whole[0])


@pytest.mark.parametrize("case", SHARED, ids=lambda c: c.name)
def test_reduce_averages_inputs_and_sums_gradients_over_the_positions_of_a_sample(case: Case) -> None:
    module, x, g = differentiated(case)
    adapter = adapter_for(module)
    samples = 1 if x.ndim == 1 else x.shape[0]
    A, G = joined(adapter, module, x), adapter.output_rows(module, x, g, "expand")
    by_sample = A.unflatten(-2, (samples, -1)), G.unflatten(-2, (samples, -1))
    torch.testing.assert_close(joined(adapter, module, x, "reduce"), by_sample[0].mean(-2))
    torch.testing.assert_close(adapter.output_rows(module, x, g, "reduce"), by_sample[1].sum(-2))


def test_unit_gradients_are_those_of_single_samples() -> None:
    for case in (c for c in CASES if "norm" in c.name and "batch" not in c.name and len(c.shape) > 2):
        module, x, g = differentiated(case)
        if x.ndim == len(getattr(module, "normalized_shape", ())):
            continue
        found = adapter_for(module).unit_gradients(module, x, g, "reduce")
        for n in range(len(x)):
            alone = torch.autograd.grad(module(x[n : n + 1]), list(module.parameters()), g[n : n + 1])
            torch.testing.assert_close(found[n], torch.stack([t.flatten() for t in alone], dim=-1))


@each_case
def test_a_call_explains_the_gradient_of_its_weight(case: Case) -> None:
    module, x, g = differentiated(case)
    torch.testing.assert_close(adapter_for(module).gradient(module, x, g), module.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_inputs_are_float32(dtype: torch.dtype) -> None:
    half, convolution = torch.ones(3, 2, 4, dtype=dtype), nn.Conv1d(2, 3, 2)
    (rows,) = adapter_for(convolution).input_rows(convolution, half, True, "expand")
    assert rows.dtype == torch.float32
    linear, norm = nn.Linear(4, 3), nn.LayerNorm(4)
    assert adapter_for(linear).output_rows(linear, half, half, "expand").dtype == torch.float32
    assert adapter_for(norm).unit_gradients(norm, half, half, "expand").dtype == torch.float32


def test_a_frozen_bias_takes_no_part() -> None:
    for module in (nn.Linear(4, 3), nn.Conv2d(2, 3, 3), nn.LayerNorm(4), nn.BatchNorm1d(4)):
        adapter = adapter_for(module)
        assert adapter.has_bias(module)
        module.bias.requires_grad_(False)
        assert not adapter.has_bias(module)


@each_case
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_rows_of_a_sample_make_its_own_gradient(case: Case, sharing: str) -> None:
    module, x, g = differentiated(case)
    adapter = adapter_for(module)
    if not isinstance(adapter, KroneckerAdapter) or adapter.diagonal_input():
        return
    bias = adapter.has_bias(module)
    a, b = adapter.by_sample(module, x, g, bias, sharing)
    found = (b.mT @ a)[..., : a.shape[-1] - bias]
    if adapter.samples(module, x) is None and sharing == "expand":
        batch = [(row, grad) for row, grad in zip(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), strict=True)]
    elif x.ndim == 1 or adapter.samples(module, x) == 1:
        batch = [(x, g)]
    else:
        batch = [(one[None], grad[None]) for one, grad in zip(x, g, strict=True)]
    expected = [adapter.matrix(module, adapter.gradient(module, one, grad)) for one, grad in batch]
    torch.testing.assert_close(found, torch.stack(expected, dim=-3))
    if len(expected) > 2:
        some = torch.tensor([2, 0])
        c, d = adapter.by_sample(module, x, g, bias, sharing, some)
        torch.testing.assert_close((c, d), (a[..., some, :, :], b[..., some, :, :]))

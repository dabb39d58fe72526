"""For tests of one's own: whether an adapter says of a layer what autograd says of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.layers import Adapter, KroneckerAdapter, Uncovered, UnitAdapter, adapter_for

__all__ = ["check_adapter"]

TOLERANCE = 1e-9  # in float64, relative to the largest entry
SHARINGS = ("expand", "reduce")


def check_adapter(
    module: nn.Module, x: Tensor, *, adapter: Adapter | type[Adapter] | None = None, seed: int = 0
) -> None:
    """Compare what an adapter says of one call `module(x)` with autograd; AssertionError says what differs, and where.

    A copy of the module in float64 is called, its parameters moved a little away from where they were, so that a start at
    zero or one hides nothing; the module stays as it is, and so do torch's random numbers. `adapter`: the one to check, or
    its class; else the one that is registered for the module. `x` should have several samples, and several positions in each
    where the layer knows of positions.

    Checked are the sum over rows of g a^T against the gradients of weight and bias, their number, the rows of each
    sample, those that are drawn, `weight_sharing="reduce"`, the second moment that is made without rows, weights as
    matrices and back, and rows under autocast; of layers that scale, the gradients of their units in the same ways.
    """
    if adapter is None:
        found = adapter_for(module)
        if isinstance(found, Uncovered):
            raise AssertionError(
                f"nothing serves this module: {found.reason}; register an adapter, or give it as adapter="
            )
        adapter = found
    elif isinstance(adapter, type):
        adapter = adapter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        call = _Call(_moved(module), x.detach().double() if x.is_floating_point() else x, adapter)
        if isinstance(adapter, KroneckerAdapter):
            _check_matrices(call, adapter)
            (_check_lookups if adapter.diagonal_input() else _check_products)(call, adapter)
        elif isinstance(adapter, UnitAdapter):
            _check_units(call, adapter)
        else:
            raise AssertionError(f"{call.who} is neither a KroneckerAdapter nor a UnitAdapter")


def _moved(module: nn.Module) -> nn.Module:
    """A copy in float64 with parameters of no special values."""
    made = copy.deepcopy(module).double()
    with torch.no_grad():
        for p in made.parameters():
            noise = 0.1 * torch.randn_like(p).clamp(-3, 3)
            p.copy_(torch.where(p == 0, noise, p * (1 + noise)))
    return made


class _Call:
    """One call of a module, and what autograd says of it."""

    def __init__(self, module: nn.Module, x: Tensor, adapter: Adapter) -> None:
        self.module, self.x, self.adapter = module, x, adapter
        self.who, self.layer = type(adapter).__name__, type(module).__name__
        self._weight = adapter.plain_weight(module)
        if self._weight is None:
            raise AssertionError(
                f"{self.who}.weight_name is {adapter.weight_name!r}, and {self.layer} has no parameter of its own of that name"
            )
        self.trained = [self._weight.requires_grad_(True)]
        self.bias = adapter.has_bias(module)
        if self.bias:
            bias = adapter.bias(module)
            assert bias is not None
            self.trained.append(bias)
        self.y = self._called()
        self.g = torch.randn_like(self.y)
        self.gradients = self.differentiated(self.g)

    def _called(self) -> Tensor:
        before = copy.deepcopy(self.module)  # with the running statistics that a norm has now
        y = self.module(self.x)
        if not isinstance(y, Tensor):
            raise AssertionError(
                f"{self.layer} returns a {type(y).__name__}: only layers that return one tensor are served"
            )
        with torch.no_grad():
            again = before(self.x)
        if not torch.equal(again, y):
            raise AssertionError(
                f"two calls of {self.layer} differ: check it in evaluation mode, or without its randomness"
            )
        return y

    def differentiated(self, g: Tensor) -> list[Tensor]:
        """The gradients of weight and bias for this gradient at the output."""
        found = torch.autograd.grad(self.y, self.trained, g, retain_graph=True, allow_unused=True)
        names = (self.adapter.weight_name, self.adapter.bias_name)
        for name, gradient in zip(names, found, strict=False):
            if gradient is None:
                raise AssertionError(f"the output of {self.layer} does not depend on its {name}")
        return [gradient for gradient in found if gradient is not None]

    def of_sample(self, number: int) -> list[Tensor]:
        """The same of one index of the output's first dimension alone."""
        alone = torch.zeros_like(self.g)
        alone[number] = self.g[number]
        return self.differentiated(alone)

    def said(self, method: str, *arguments: Any) -> Any:
        """What the adapter answers; what it raises is its fault."""
        try:
            with torch.no_grad():
                answer = getattr(self.adapter, method)(self.module, *arguments)
                return list(answer) if method == "input_rows" else answer
        except Exception as error:
            raise AssertionError(f"{self.who}.{method} raises {type(error).__name__}: {error}") from error

    def rows(self, sharing: str, bias: bool, drawn: Tensor | None = None) -> Tensor:
        """All input rows."""
        return torch.cat(self.said("input_rows", self.x, bias, sharing, drawn), -2)

    def made(self, method: str, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """All rows that a method makes, or those drawn."""
        if method == "input_rows":
            return self.rows(sharing, self.bias, drawn)
        found: Tensor = self.said(method, self.x, self.g, sharing, drawn)
        return found

    def same(self, method: str, what: str, found: Tensor, expected: Tensor) -> None:
        """Refuse numbers that differ, in words."""
        self.shaped(method, what, found.shape, expected.shape)
        size = float(expected.abs().amax()) if expected.numel() else 0.0
        difference = float((found - expected).abs().amax()) if expected.numel() else 0.0
        if not difference <= TOLERANCE * max(size, 1e-3):
            how = _likeness(found, expected)
            raise AssertionError(
                f"{self.who}.{method}: {what} differs from what it should be by {difference:.3g}, where the largest entry is "
                f"{size:.3g}{how}"
            )

    def shaped(self, method: str, what: str, found: Sequence[int], expected: Sequence[int]) -> None:
        """Refuse another shape."""
        if tuple(found) != tuple(expected):
            raise AssertionError(
                f"{self.who}.{method}: {what} has shape {tuple(found)}, and {tuple(expected)} is right"
            )

    def counted(self, sharing: str, rows: int) -> None:
        """Refuse another number of rows than there are."""
        said = self.said("count", self.g, sharing)
        if said != rows:
            raise AssertionError(f"{self.who}.count says {said} rows under {sharing!r}, and there are {rows}")


def _likeness(found: Tensor, expected: Tensor) -> str:
    """What a wrong answer looks like, in the hope that it helps."""
    large = expected.abs() > 1e-6 * expected.abs().amax()
    ratios = (found / expected)[large]
    if len(ratios) and float((ratios - ratios[0]).abs().amax()) <= 1e-6 * float(ratios[0].abs()):
        factor = float(ratios[0])
        return ": its sign is wrong" if abs(factor + 1) < 1e-6 else f": it is {factor:.4g} times as large"
    if found.ndim > 1 and torch.allclose(found.square().sum(-2).sort(-1)[0], expected.square().sum(-2).sort(-1)[0]):
        return ": the columns are the right ones in another order"
    return ""


def _check_matrices(call: _Call, adapter: KroneckerAdapter) -> None:
    """Weights as matrices, and back."""
    weight = torch.randn_like(call.trained[0])
    matrix, out = call.said("matrix", weight), call.said("output_shape")
    into = call.said("input_shape", False)
    call.shaped("matrix", "the weight", matrix.shape, (*out, into[-1]))
    if not adapter.diagonal_input():
        call.shaped("input_shape", "a factor with a bias", call.said("input_shape", True), (*into[:-1], into[-1] + 1))
    back = call.said("tensor", matrix)
    call.same("tensor", "a weight made a matrix and back", back, weight)
    columns, stored = call.said("columns"), call.said("stored", weight)
    call.same("stored", "the weight", stored, matrix if columns is None else matrix[..., columns])
    if call.bias:
        tensors = [weight, torch.randn_like(call.trained[1])]
        vector = tuple(call.said("vector", tensors[1]).shape)
        if vector != tuple(out):
            raise AssertionError(
                f"{call.who}.vector makes {vector} of the bias, and output_shape says {tuple(out)}: is the weight stored the "
                "other way round (transposed)?"
            )
        joined = call.said("joined", tensors, torch.float64)
        for name, one, again in zip(("weight", "bias"), tensors, call.said("parted", joined, tensors), strict=True):
            call.same("parted", f"a {name} that was joined and parted", again, one)


def _check_gradient(call: _Call) -> None:
    found = call.said("gradient", call.x, call.g)
    call.same("gradient", f"the gradient of {call.adapter.weight_name}", found, call.gradients[0])


def _check_products(call: _Call, adapter: KroneckerAdapter) -> None:
    """Rows, all in all, by sample and drawn."""
    a, g = call.rows("expand", False), call.said("output_rows", call.x, call.g, "expand")
    *groups, into = call.said("input_shape", False)
    *_, out = call.said("output_shape")
    call.shaped("output_rows", "all rows together", g.shape, (*groups, g.shape[-2], out))
    call.shaped(
        "input_rows", "all rows together, of which output_rows has as many,", a.shape, (*groups, g.shape[-2], into)
    )
    call.counted("expand", g.shape[-2])
    with_one = call.rows("expand", True)
    ones = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
    call.same("input_rows", "rows with a bias, whose last column is one,", with_one, ones)
    if call.bias:
        expected = call.said("vector", call.gradients[1])
        call.same("output_rows", f"the sum of all rows, the gradient of {adapter.bias_name},", g.sum(-2), expected)
    # The bias has cleared output_rows by now, where there is one.
    suspect = "input_rows" if call.bias else "input_rows or output_rows"
    expected = call.said("matrix", call.gradients[0])
    call.same(suspect, f"the sum of g a^T, the gradient of {adapter.weight_name},", g.mT @ a, expected)
    _check_gradient(call)
    for sharing in SHARINGS:
        _check_samples(call, sharing)
        _check_drawn(call, sharing, "input_rows")
        _check_drawn(call, sharing, "output_rows")
        _check_moment(call, sharing)
    _check_precision(call, "input_rows", call.bias, "expand")
    _check_precision(call, "output_rows", "expand")


def _check_samples(call: _Call, sharing: str) -> None:
    """Rows sample by sample make the gradients of single samples; "reduce" averages inputs and sums gradients."""
    a, g = call.said("by_sample", call.x, call.g, call.bias, sharing)
    samples, known = g.shape[-3], call.said("samples", call.x)
    if sharing == "reduce" or known is not None:
        whole = call.y.shape[0] if call.y.ndim > 1 else 1
        if known in (None, whole):  # else it is one sample that has no dimension of its own
            call.shaped("by_sample", f"under {sharing!r} the samples", (samples,), (whole,))
    if samples == call.y.shape[0] and call.y.ndim > 1:
        for number in range(samples):
            expected = call.said("matrix", call.of_sample(number)[0])
            found = (g[..., number, :, :].mT @ a[..., number, :, :])[..., : expected.shape[-1]]
            call.same("by_sample", f"the gradient of sample {number} under {sharing!r}", found, expected)
    if sharing == "reduce":
        reduced = call.rows(sharing, call.bias), call.said("output_rows", call.x, call.g, sharing)
        call.same("input_rows", "rows under 'reduce', the means over a sample's positions,", reduced[0], a.mean(-2))
        call.same("output_rows", "rows under 'reduce', the sums over a sample's positions,", reduced[1], g.sum(-2))
        call.counted(sharing, samples)
    if samples > 1:
        some = _drawn(samples)
        for whole, part in zip((a, g), call.said("by_sample", call.x, call.g, call.bias, sharing, some), strict=True):
            call.same("by_sample", f"drawn samples under {sharing!r}", part, whole[..., some, :, :])


def _drawn(rows: int) -> Tensor:
    """Fewer than there are, in no order."""
    return torch.randperm(rows)[: max(1, (rows + 1) // 2)]


def _check_drawn(call: _Call, sharing: str, method: str) -> None:
    """What is drawn is what would be there among all."""
    whole, dim = call.made(method, sharing), 0 if method == "unit_gradients" else -2
    if whole.shape[dim] > 1:
        some = _drawn(whole.shape[dim])
        call.same(
            method, f"what is drawn under {sharing!r}", call.made(method, sharing, some), whole.index_select(dim, some)
        )


def _check_moment(call: _Call, sharing: str) -> None:
    """The second moment that is made without rows."""
    make, unit = call.said("input_moment", call.x, call.bias, sharing), torch.tensor(0.5, dtype=torch.float64)
    if make is None:
        return
    a = call.rows(sharing, call.bias)
    expected = (a.mT @ a).triu() / 4
    found, at = torch.zeros_like(expected), 0
    for strip in make(unit):
        found[at : at + len(strip), found.shape[-1] - strip.shape[-1] :] = strip
        at += len(strip)
    call.same("input_moment", f"the second moment under {sharing!r}", found.triu(), expected)


def _check_lookups(call: _Call, adapter: KroneckerAdapter) -> None:
    """One-hot inputs: how often each column was meant, which is the gradient of an output that counts its rows."""
    g = call.said("output_rows", call.x, call.g, "expand")
    call.shaped("output_rows", "all rows together", g.shape, (g.shape[0], *call.said("output_shape")))
    call.counted("expand", g.shape[0])
    _check_gradient(call)
    expected = call.said("matrix", call.differentiated(torch.ones_like(call.y))[0])[0]
    (counts,) = call.said("input_rows", call.x, False, "expand")
    call.same("input_rows", "how often each column was looked up", counts.to(expected), expected)
    _check_drawn(call, "expand", "output_rows")


def _check_units(call: _Call, adapter: UnitAdapter) -> None:
    """Gradients of scales and shifts, all in all, by sample and drawn."""
    for sharing in SHARINGS:
        found, expected = call.made("unit_gradients", sharing), _stacked(call.gradients)
        call.shaped("unit_gradients", "all samples together", found.shape, (len(found), *expected.shape))
        call.counted(sharing, len(found))
        call.same("unit_gradients", f"the sum over samples under {sharing!r}", found.sum(0), expected)
        if sharing == "reduce" and len(found) == call.y.shape[0]:
            for number in range(len(found)):
                alone = _stacked(call.of_sample(number))
                call.same("unit_gradients", f"the gradient of sample {number}", found[number], alone)
        _check_drawn(call, sharing, "unit_gradients")
    _check_gradient(call)
    _check_precision(call, "unit_gradients", "expand")


def _stacked(gradients: Sequence[Tensor]) -> Tensor:
    """(units, 1 or 2)."""
    return torch.stack([gradient.flatten() for gradient in gradients], -1)


def _check_precision(call: _Call, method: str, *arguments: Any) -> None:
    """Under autocast inputs and gradients come in half precision; statistics are float32 all the same."""
    if not call.x.is_floating_point():
        return
    half = copy.copy(call)
    half.module = copy.deepcopy(call.module).float()
    tensors = [half.x.bfloat16()] if method == "input_rows" else [half.x.bfloat16(), half.g.bfloat16()]
    made = half.said(method, *tensors, *arguments)
    kinds = {part.dtype for part in (made if isinstance(made, list) else [made])}
    if kinds != {torch.float32}:
        said = " and ".join(sorted(str(kind) for kind in kinds))
        raise AssertionError(
            f"{call.who}.{method} makes rows in {said} of inputs in bfloat16; make them in torch.float32"
        )

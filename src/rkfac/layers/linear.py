"""Linear layers on inputs of any number of leading dimensions, and their kin with a transposed weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from rkfac.layers.base import (
    MAX_CHUNK,
    NOT_PLAIN,
    Adapter,
    KroneckerAdapter,
    Uncovered,
    append_one,
    by_position,
    overridden,
    recognises,
    register,
    statistics_dtype,
    sum_of_positions,
)


@register(nn.Linear)
class LinearAdapter(KroneckerAdapter):
    """y = W x + b at every leading position."""

    rowwise = True

    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Inputs, one row a position (expand) or their mean over a sample's positions (reduce)."""
        rows = _taken(x, sharing, drawn)
        rows = rows.mean(1) if sharing == "reduce" else rows
        for part in rows.split(max(1, MAX_CHUNK // rows.shape[-1])):
            yield append_one(part, bias)

    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """Gradients at the output, one row a position or their sum over a sample's positions."""
        rows = _taken(g, sharing, drawn)
        return sum_of_positions(rows, 1, g.dtype) if sharing == "reduce" else rows

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Positions, or samples."""
        samples = g.shape[0] if g.ndim > 1 else 1
        return samples if sharing == "reduce" else g.numel() // g.shape[-1]

    def input_shape(self, module: nn.Module, bias: bool) -> tuple[int, ...]:
        """(d_in [+ 1],)."""
        return (self.matrix(module, self.weight(module)).shape[1] + bias,)

    def output_shape(self, module: nn.Module) -> tuple[int, ...]:
        """(d_out,)."""
        return (self.matrix(module, self.weight(module)).shape[0],)

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The weight is the matrix."""
        return weight


class TransposedAdapter(LinearAdapter):
    """y = x W + b with W (d_in, d_out), at every leading position."""

    rowwise = False  # hooks that look at rows take the weight for the matrix

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """(d_out, d_in)."""
        return weight.mT

    def tensor(self, module: nn.Module, matrix: Tensor) -> Tensor:
        """Transposed back."""
        return matrix.mT


CONV1D = TransposedAdapter()


@recognises
def _conv1d(module: nn.Module) -> Adapter | Uncovered | None:
    """Conv1D of the transformers library (GPT-2), known by its name and its shapes: nothing of it is imported."""
    for kind in type(module).__mro__:
        if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
            break
    else:
        return None
    if reason := overridden(module, kind):
        return Uncovered(reason)
    weight, bias = CONV1D.plain_weight(module), CONV1D.bias(module)
    if weight is None or bias is None:
        return NOT_PLAIN
    nx, nf = getattr(module, "nx", None), getattr(module, "nf", None)
    if weight.shape != (nx, nf) or bias.shape != (nf,):
        return Uncovered(f"Conv1D of another shape than its nx={nx} and nf={nf} say")
    return CONV1D


def _taken(x: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
    """(n, positions, d) of whole samples under "reduce", (n, d) of single positions otherwise."""
    rows = by_position(x, drawn) if sharing != "reduce" else _by_sample(x if drawn is None else x[drawn])
    return rows.to(statistics_dtype(x))


def _by_sample(x: Tensor) -> Tensor:
    """(d,) -> (1, 1, d); (n, d) -> (n, 1, d); (n, ..., d) -> (n, positions, d)."""
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(x.shape[0], -1, x.shape[-1])

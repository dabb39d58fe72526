"""Layers that multiply by a weight, whatever else they do before and after: what an own layer is most easily made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from rkfac.layers.base import (
    MAX_CHUNK,
    KroneckerAdapter,
    append_one,
    by_position,
    precise,
    statistics_dtype,
    sum_of_positions,
)


class ProductAdapter(KroneckerAdapter):
    """A layer in which W a + b happens at every position, a being made of its input and its output being made of that.

    What one's own says of it; where it says nothing it is nn.Linear:

      inputs            a, what the weight multiplies, (..., d_in), given the layer's input
      gradients         the gradient at W a + b, (..., d_out), given that at the layer's output
      transposed        whether the weight is stored as (d_in, d_out)
      weight_name, bias_name   the parameters' names; bias_name = None: no bias is added to W a

    The first dimension of both is the samples', all but the last are positions, as many of a as of gradients. `count` is to
    be said where the layer's output has other positions. Inputs and gradients come in float32 or better, and nothing of
    what is done with them is differentiated.
    """

    transposed: ClassVar[bool] = False

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the weight multiplies, (..., d_in)."""
        return x

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """The gradient at W a + b, (..., d_out)."""
        return g

    @torch.no_grad()
    def _inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return self.inputs(module, precise(x))

    @torch.no_grad()
    def _gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return self.gradients(module, precise(x), precise(g))

    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        """What the weight multiplies, one row a position (expand) or the mean over a sample's positions (reduce)."""
        rows = _taken(self._inputs(module, x), sharing, drawn)
        rows = rows.mean(1) if sharing == "reduce" else rows
        for part in rows.split(max(1, MAX_CHUNK // rows.shape[-1])):
            yield append_one(part, bias)

    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """Gradients at the product, one row a position or their sum over a sample's positions."""
        rows = _taken(self._gradients(module, x, g), sharing, drawn)
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
        """(d_out, d_in): the weight itself, or transposed; more dimensions of d_in than one are put together."""
        return weight.flatten(0, -2).mT if self.transposed else weight.flatten(1)

    def tensor(self, module: nn.Module, matrix: Tensor) -> Tensor:
        """Back in the weight's shape."""
        return (matrix.mT if self.transposed else matrix).reshape(self.weight(module).shape)

    def vector(self, module: nn.Module, bias: Tensor) -> Tensor:
        """(d_out,)."""
        return bias.flatten()


def _taken(x: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
    """(n, positions, d) of whole samples under "reduce", (n, d) of single positions otherwise."""
    rows = by_position(x, drawn) if sharing != "reduce" else _by_sample(x if drawn is None else x[drawn])
    return rows.to(statistics_dtype(x))


def _by_sample(x: Tensor) -> Tensor:
    """(d,) -> (1, 1, d); (n, d) -> (n, 1, d); (n, ..., d) -> (n, positions, d)."""
    return x.reshape(1, 1, -1) if x.ndim == 1 else x.reshape(x.shape[0], -1, x.shape[-1])

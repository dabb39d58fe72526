"""How the entries of a layer's parameters are the entries of the matrix that its two factors act on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.layers.base import KroneckerAdapter


@dataclass(frozen=True, eq=False)
class Layout:
    """A flat vector (weight.flatten(), then bias) as a matrix ([groups,] d_G, d_A), the bias being its last column.

    `transposed`: the weight's first dimension is the input's (tables); `order`: where each entry of the matrix is in the flat
    weight, for layers whose adapter has an order of its own.
    """

    shapes: tuple[tuple[int, ...], ...]  # of weight and, where it takes part, bias
    groups: tuple[int, ...]
    outputs: int
    transposed: bool = False
    order: Tensor | None = None

    @property
    def size(self) -> int:
        """Entries of all parameters."""
        return sum(map(math.prod, self.shapes))

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Of one matrix."""
        return (*self.groups, self.outputs, self.size // (math.prod(self.groups) * self.outputs))

    def joined(self, rows: Tensor) -> Tensor:
        """Flat vectors, (k, size), as matrices."""
        entries = math.prod(self.shapes[0])
        weight = rows[:, :entries] if self.order is None else rows[:, self.order]
        if self.transposed:
            matrix = weight.reshape(len(rows), -1, self.outputs).mT
        else:
            matrix = weight.reshape(len(rows), *self.groups, self.outputs, -1)
        if len(self.shapes) == 1:
            return matrix
        return torch.cat([matrix, rows[:, entries:].reshape(len(rows), *self.groups, self.outputs, 1)], -1)

    def parted(self, matrices: Tensor) -> Tensor:
        """The inverse of `joined`."""
        weight = matrices if len(self.shapes) == 1 else matrices[..., :-1]
        flat = (weight.mT if self.transposed else weight).reshape(len(matrices), -1)
        if self.order is not None:
            flat = torch.empty_like(flat).index_copy_(1, self.order, flat)
        return flat if len(self.shapes) == 1 else torch.cat([flat, matrices[..., -1].reshape(len(matrices), -1)], 1)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor a parameter as a flat vector."""
        shapes = [tuple(t.shape) for t in tensors]
        if shapes != list(self.shapes):
            raise ValueError(f"tensors of shapes {shapes} were given, expected {list(self.shapes)}")
        return torch.cat([t.reshape(-1) for t in tensors])

    def shaped(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `flat`."""
        parts = vector.split([math.prod(shape) for shape in self.shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def numbers(self) -> dict[str, Any]:
        """What a file says of it beside `order`."""
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "groups": list(self.groups),
            "outputs": self.outputs,
            "transposed": self.transposed,
        }


def layout_from(numbers: Mapping[str, Any], order: Tensor | None) -> Layout:
    """The inverse of `Layout.numbers`."""
    shapes = tuple(tuple(map(int, shape)) for shape in numbers["shapes"])
    return Layout(shapes, tuple(numbers["groups"]), int(numbers["outputs"]), bool(numbers["transposed"]), order)


def layout_of(adapter: KroneckerAdapter, module: nn.Module, parameters: Sequence[Tensor]) -> Layout:
    """Of a layer with two factors, asked of its adapter by the numbers of a weight's entries."""
    weight = parameters[0]
    shapes = tuple(tuple(p.shape) for p in parameters)
    numbers = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
    matrix = adapter.matrix(module, numbers)
    groups, outputs = matrix.shape[:-2], matrix.shape[-2]
    if torch.equal(matrix.flatten(), numbers.flatten()):
        return Layout(shapes, tuple(groups), outputs)
    if not groups and torch.equal(matrix.mT.flatten(), numbers.flatten()):
        return Layout(shapes, (), outputs, transposed=True)
    if matrix.numel() != weight.numel() or not torch.equal(matrix.flatten().sort()[0], numbers.flatten()):
        raise ValueError(
            f"{type(adapter).__name__}.matrix does not lay out a weight of shape {tuple(weight.shape)} entry by entry"
        )
    return Layout(shapes, tuple(groups), outputs, order=matrix.flatten())


def layout_of_units(parameters: Sequence[Tensor]) -> Layout:
    """Of scales and shifts: a group a unit, with one row of one or two entries."""
    return Layout(tuple(tuple(p.shape) for p in parameters), (parameters[0].numel(),), 1)

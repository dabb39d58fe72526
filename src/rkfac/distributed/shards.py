"""Layers that are spread over processes by their rows (fully_shard), and come together for a step.

What a layer's preconditioner needs whole is brought to one process, the layer's owner, and its rows go back from there: two
exchanges a step for all layers together, and nobody has more than a share of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.curvature.block import Block
from rkfac.distributed.assignment import assigned
from rkfac.distributed.world import World


@dataclass(frozen=True)
class Spread:
    """One layer's tensors, one a parameter: their whole shapes and their precision, and who brings them together."""

    name: str
    owner: int
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    def rows(self, size: int, rank: int) -> list[torch.Size]:
        """The shapes of what one of `size` processes has of them."""
        return [torch.Size((share(shape[0], size)[rank], *shape[1:])) for shape in self.shapes]

    def nbytes(self, size: int, rank: int) -> int:
        """The same in bytes."""
        return sum(math.prod(shape) for shape in self.rows(size, rank)) * self.dtype.itemsize


def share(length: int, size: int) -> list[int]:
    """How many of `length` rows each process has, as torch.chunk cuts them: the last ones may have none."""
    each = -(-length // size)
    return [max(0, min(each, length - rank * each)) for rank in range(size)]


class Shards:
    """Who brings which layer together: decided once for every layer, by what a step costs there, and never changed."""

    device = torch.device("cpu")  # of what is spread

    def __init__(self, world: World) -> None:
        self.world = world
        self._owner: dict[str, int] = {}
        self._load = [0.0] * world.size

    def spread(self, blocks: Collection[Block], dtypes: Sequence[torch.dtype]) -> list[Spread]:
        """Layers that take a step now, and the precision that each is worked on in."""
        new = [block for block in blocks if block.name not in self._owner]
        costs = [float(sum(p.numel() for p in block.parameters)) for block in new]
        for block, rank in zip(new, assigned(costs, self._load), strict=True):
            self._owner[block.name] = rank
        return [
            Spread(block.name, self._owner[block.name], tuple(p.shape for p in block.parameters), dtype)
            for block, dtype in zip(blocks, dtypes, strict=True)
        ]

    def mine(self, layers: Sequence[Spread]) -> list[int]:
        """Numbers of the layers that this process brings together."""
        return [number for number, layer in enumerate(layers) if layer.owner == self.world.rank]

    def brought(self, layers: Sequence[Spread], rows: Sequence[Sequence[Tensor]]) -> dict[int, list[Tensor]]:
        """Everybody's rows of every layer, at its owner: the whole tensors of those that are this process's."""
        world, mine, self.device = self.world, self.mine(layers), rows[0][0].device
        out = [[t for n, layer in enumerate(layers) if layer.owner == rank for t in rows[n]] for rank in self._ranks]
        coming = [sum(layers[n].nbytes(world.size, rank) for n in mine) for rank in self._ranks]
        pieces = self._swapped(out, coming, f"rows of {_named(layers)} for a step")
        found: dict[int, list[Tensor]] = {}
        for number in mine:
            layer = layers[number]
            counts = [layer.rows(world.size, rank) for rank in self._ranks]
            # By tensor, then by who sent it: rows of the first come first.
            taken = [[pieces[rank].take(shape, layer.dtype) for shape in counts[rank]] for rank in self._ranks]
            found[number] = [
                torch.cat(parts).view(layer.dtype).view(shape)
                for shape, parts in zip(layer.shapes, zip(*taken, strict=True), strict=True)
            ]
        return found

    def returned(self, layers: Sequence[Spread], whole: Mapping[int, Sequence[Tensor]]) -> list[list[Tensor]]:
        """The way back: this process's rows of every layer, from its owner's whole tensors."""
        world, mine = self.world, self.mine(layers)
        out: list[list[Tensor]] = [[] for _ in self._ranks]
        for number in mine:
            for tensor in whole[number]:
                for rank, some in enumerate(tensor.split(share(len(tensor), world.size))):
                    out[rank].append(some)
        coming = [
            sum(one.nbytes(world.size, world.rank) for one in layers if one.owner == rank) for rank in self._ranks
        ]
        pieces = self._swapped(out, coming, f"rows of the steps of {_named(layers)}")
        return [
            [
                pieces[layer.owner].take(shape, layer.dtype).clone().view(layer.dtype).view(shape)
                for shape in layer.rows(world.size, world.rank)
            ]
            for layer in layers
        ]

    @property
    def _ranks(self) -> range:
        return range(self.world.size)

    def _swapped(self, out: Sequence[Sequence[Tensor]], coming: Sequence[int], what: str) -> list[Pile]:
        """Tensors for everybody against theirs, as bytes; a pile from each."""
        flat = [t.contiguous().view(-1).view(torch.uint8) for some in out for t in some]
        flat = flat or [torch.empty(0, dtype=torch.uint8, device=self.device)]
        going = [sum(t.nbytes for t in some) for some in out]
        found = self.world.swapped(torch.cat(flat), going, coming, what)
        return [Pile(some) for some in found.split(list(coming))]


@dataclass
class Pile:
    """Bytes that one process sent, taken from the front."""

    bytes: Tensor
    at: int = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Those of the next tensor."""
        begin, self.at = self.at, self.at + math.prod(shape) * dtype.itemsize
        return self.bytes[begin : self.at]


def _named(layers: Sequence[Spread]) -> str:
    return f"{len(layers)} layers, among them {layers[0].name!r}"

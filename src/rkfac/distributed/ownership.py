"""Which process keeps which average (memory="owned"): wide factors are in one process alone, all others in every one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rkfac.curvature.block import Block
from rkfac.curvature.factor import Factor
from rkfac.distributed.assignment import assigned
from rkfac.distributed.world import World

Place = tuple[str, str]  # a layer's name and a side


class Ownership:
    """Decided once for every factor, by the time that refreshes take, and never changed."""

    def __init__(self, world: World, owned: bool) -> None:
        self.world = world
        self._owned = owned and not world.alone
        self._owner: dict[Place, int] = {}
        self._load = [0.0] * world.size

    def owner(self, block: Block, side: str) -> int | None:
        """Who keeps a factor; None: everybody."""
        return self._owner.get((block.name, side))

    def owned(self) -> set[str]:
        """Names of layers with a factor that one process keeps."""
        return {name for name, _ in self._owner}

    def settle(self, blocks: Collection[Block]) -> None:
        """Give every factor that may have one an owner, and let go of those that others keep."""
        if not self._owned:
            return
        places = [(block, side) for block in blocks for side in block.ownable]
        new = [(block, side) for block, side in places if (block.name, side) not in self._owner]
        costs = [float(block.factors[side].refresh_cost) for block, side in new]
        for (block, side), rank in zip(new, assigned(costs, self._load), strict=True):
            self._owner[block.name, side] = rank
        for block, side in places:
            if self.owner(block, side) != self.world.rank:
                block.factors[side].leave()

    @contextmanager
    def whole(self, blocks: Collection[Block]) -> Iterator[None]:
        """Everybody has all averages meanwhile, as they are saved: all processes must ask for it together."""
        borrowed: list[Factor[Any]] = []
        try:
            for block in blocks:
                for side, factor in block.factors.items():
                    owner = self.owner(block, side)
                    if owner is not None:
                        self._lend(factor, owner, f"the {side} factor of {block.name!r} for a state that is saved")
                        borrowed.append(factor)
            yield
        finally:
            for factor in borrowed:
                factor.borrow(None)

    def _lend(self, factor: Factor[Any], owner: int, what: str) -> None:
        mine = owner == self.world.rank
        value, level = factor.lend()
        exists, level = self.world.told((value is not None, level) if mine else None, what)[owner]
        if not exists:
            factor.borrow((None, level))
            return
        buffer = value if mine else torch.empty(factor.saved_shape, dtype=factor.dtype, device=factor.device)
        assert buffer is not None
        factor.borrow((self.world.lent(buffer, owner, what), level))

"""What one optimizer keeps for training together with others: who they are, who keeps what, and what is under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from rkfac.curvature.block import Block, Group
from rkfac.distributed.agreement import agree, look_at_weights
from rkfac.distributed.early import Early
from rkfac.distributed.ownership import Ownership
from rkfac.distributed.refresh import refresh
from rkfac.distributed.sharding import group_of_shards
from rkfac.distributed.shards import Shards
from rkfac.distributed.statistics import Pooled, pool
from rkfac.distributed.world import ALONE, World, world_of


class Company:
    """Alone until others are found; then every method below is something that all of them do together."""

    def __init__(self, model: nn.Module, group: Any, memory: str) -> None:
        """`model` as it was given, wrapped or not; `group`: False, None or a process group."""
        self.memory = memory
        self._given, self._group = (
            weakref.ref(model),
            group_of_shards(model, group),
        )  # once: a step is no time to look for shards
        self._enter(ALONE)
        self._met = False

    def _enter(self, world: World) -> None:
        self.world, self.early = world, Early(world)
        self._ownership = Ownership(world, self.memory == "owned")
        self.shards = Shards(world)

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.world.alone

    def newcomers(self, model: nn.Module) -> World | None:
        """Processes that have come since the last look, None if nothing has changed; `model` where the given one is gone."""
        given = self._given()  # modules may define their own len() and truth
        found = world_of(model if given is None else given, self._group)
        if found.meeting is self.world.meeting:
            return None
        if not self.alone:
            raise RuntimeError(
                f"the process group of {self.world.size} processes is gone, or another one has come: build a new optimizer"
            )
        return found

    def join(self, found: World, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        """Train with these from now on, if they have the same model and settings."""
        agree(found, parameters, {**settings, "memory": self.memory})
        self._enter(found)

    def meet(self, model: nn.Module) -> None:
        """Once, when the first step comes: wrappers may have made replicas equal after the optimizer was built."""
        if not self._met and not self.alone:
            self._met = True
            look_at_weights(self.world, dict(model.named_parameters()))

    # --- a step

    def agree_on_natural(self, blocks: Collection[Block]) -> None:
        """A process that called a layer makes everybody's averaged gradient of it a natural one."""
        if self.alone or not blocks:
            return
        flags = [float(block.arrived_natural) for block in blocks]
        device = next(iter(blocks)).weight.device
        rows = self.world.gathered(flags, device, "which gradients are natural")
        for block, column in zip(blocks, zip(*rows, strict=True), strict=True):
            block.natural = block.natural or any(column)

    def pool(self, blocks: Collection[Block], seen: Callable[[Block], bool]) -> Pooled:
        """Let pending statistics be those of all."""
        return Pooled() if self.alone or not blocks else pool(blocks, self._ownership, self.early, seen)

    def refresh(self, due: Sequence[tuple[Block, Group]]) -> None:
        """Decompose anew, each a share."""
        refresh(due, self._ownership)

    def plan(self, blocks: Collection[Block]) -> None:
        """Decide what leaves early in the coming step."""
        if not self.alone:
            self.early.finish()
            self.early.plan(blocks, self._ownership.owned())

    def whole(self, blocks: Collection[Block]) -> AbstractContextManager[None]:
        """Everybody has all averages meanwhile, as they are saved."""
        return self._ownership.whole(blocks)

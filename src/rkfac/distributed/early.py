"""Sums that are under way while the backward pass still runs.

A layer's statistics are complete for a pass when its weight's gradient is; nobody knows whether another pass will follow. So
they are sent at once, in the units of the last statistics, and believed only if nothing came afterwards, in any process, and
the units fit: everything else is added up again in the step. Every process sends every bucket once between two steps, in
the same order and in a process group of its own, with zeros for what it has not seen, so that nobody waits for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from rkfac import compat
from rkfac.curvature.block import Block
from rkfac.curvature.statistics import Statistics
from rkfac.distributed.world import World
from rkfac.linalg import peak

BUCKET = 1 << 20  # bytes: small enough to leave early
ROOM = 2.0**60  # how far sums may be from their units


@dataclass(eq=False)
class _Bucket:
    """Neighbouring layers whose sums travel together."""

    blocks: list[Block]
    sizes: list[list[torch.Size]]
    flat: Tensor | None = None
    work: Any = None
    # What each layer's sums were made of; None: of nothing, for its shapes are others by now.
    sent: dict[int, tuple[Statistics, int] | None] = field(default_factory=dict)


class Early:
    """All of them between two steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group: Any = None
        self._buckets: list[_Bucket] = []
        self._of: dict[int, _Bucket] = {}
        self._ready: set[int] = set()
        self._next = 0
        self._units: dict[str, list[int]] = {}
        self._totals: dict[int, list[Tensor]] = {}
        self._peaks: dict[int, list[float]] = {}
        self._finished = True

    # --- before and during the backward pass

    def plan(self, blocks: Collection[Block], owned: Collection[str]) -> None:
        """Decide what leaves early in the coming step: whatever has units and is kept by everybody.

        `owned`: names of layers with a factor that one process keeps.
        """
        self._buckets, self._of, self._ready, self._next, self._totals = [], {}, set(), 0, {}
        self._finished = False
        if self._world.alone:
            return
        some: list[Block] = []
        room = BUCKET
        for block in reversed(list(blocks)):  # as gradients come
            if block.wanted and block.name in self._units and block.name not in owned and not block.beside():
                some.append(block)
                room -= sum(factor.sum_shape.numel() * factor.dtype.itemsize for factor, _ in block.summands())
                if room <= 0:
                    self._add(some)
                    some, room = [], BUCKET
        if some:
            self._add(some)
        if self._buckets and self._group is None:
            self._group = self._channel()
            # Its threads wake up a hundred times a second, for as long as it is there.
            weakref.finalize(self, _hang_up, self._group)

    def _add(self, blocks: list[Block]) -> None:
        dtypes = {factor.dtype for block in blocks for factor, _ in block.summands()}
        for dtype in sorted(dtypes, key=str):  # a message has one precision
            mine = [b for b in blocks if b.summands()[0][0].dtype == dtype]
            bucket = _Bucket(mine, [[factor.sum_shape for factor, _ in b.summands()] for b in mine])
            self._buckets.append(bucket)
            self._of |= {id(block): bucket for block in mine}

    def arrived(self, block: Block) -> None:
        """A pass has reached a layer's weight."""
        if id(block) in self._of and not self._finished:
            self._ready.add(id(block))
            while self._next < len(self._buckets) and all(
                id(b) in self._ready for b in self._buckets[self._next].blocks
            ):
                self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        sums: list[Tensor] = []
        for block, shapes in zip(bucket.blocks, bucket.sizes, strict=True):
            pairs, units = block.summands(), self._units[block.name]
            fits = [factor.sum_shape for factor, _ in pairs] == shapes
            bucket.sent[id(block)] = (block.pending, block.pending.calls) if fits else None
            if fits:
                sums += [factor.summed(moment, unit) for (factor, moment), unit in zip(pairs, units, strict=True)]
            else:  # what was promised has the shapes that were planned
                sums += [torch.zeros(shape, dtype=pairs[0][0].dtype, device=pairs[0][0].device) for shape in shapes]
        bucket.flat = torch.cat([t.reshape(-1) for t in sums])
        self._world.sent["statistics"] += bucket.flat.nbytes
        with self._world.exchanging(f"statistics of {bucket.blocks[0].name!r} and its neighbours"):
            bucket.work = distributed.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _channel(self) -> Any:
        """A group of its own: what leaves early must not stand between the messages of others.

        Made between two steps, where everybody passes: inside a backward pass those who wait for it and those who wait for
        their gradients would wait for each other.
        """
        group = self._world.group or distributed.group.WORLD
        ranks = distributed.get_process_group_ranks(group)
        timeout = compat.timeout_of(group, self._buckets[0].blocks[0].weight.device)
        # Where all processes are here, torch's ordinary way: the names of the other one depend on who is in which group.
        some = group is not distributed.group.WORLD
        with self._world.exchanging("a channel for statistics that leave early"):
            return distributed.new_group(ranks, timeout=timeout, use_local_synchronization=some)

    # --- in the step

    def finish(self) -> None:
        """Send what is left and wait for everything."""
        if self._finished:
            return
        self._finished = True
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            with self._world.exchanging(f"statistics of {bucket.blocks[0].name!r} and its neighbours"):
                bucket.work.wait()
            assert bucket.flat is not None
            counts = [shape.numel() for shapes in bucket.sizes for shape in shapes]
            parts = iter(bucket.flat.split(counts))
            for block, shapes in zip(bucket.blocks, bucket.sizes, strict=True):
                self._totals[id(block)] = [next(parts).view(shape) for shape in shapes]
        totals = [total for found in self._totals.values() for total in found]
        peaks = iter(
            torch.stack([peak(total).double() for total in totals]).tolist() if totals else []
        )  # one read for all
        self._peaks = {block: [next(peaks) for _ in found] for block, found in self._totals.items()}

    def holds(self, block: Block) -> bool:
        """Whether what was sent of a layer is what this process has seen of it: nothing came later, nothing was dropped."""
        bucket = self._of.get(id(block))
        if bucket is None:
            return False
        known = bucket.sent[id(block)]
        return known is not None and known[0] is block.pending and known[1] == block.pending.calls

    def totals(self, block: Block, alive: Sequence[bool]) -> list[Tensor] | None:
        """The sums of all processes, None where their units do not fit; all processes find the same.

        `alive`: which of them are known not to be zero, whatever their units make of them.
        """
        for largest, living in zip(self._peaks[id(block)], alive, strict=True):
            if not (1 / ROOM < largest < ROOM) and (living or largest != 0):
                return None
        return self._totals[id(block)]

    def units(self, block: Block) -> list[int]:
        """Exponents of what was sent."""
        return self._units[block.name]

    def learn(self, exponents: Mapping[str, list[int]]) -> None:
        """Units of the coming statistics: those of these."""
        self._units.update(exponents)


def _hang_up(channel: Any) -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group(channel)

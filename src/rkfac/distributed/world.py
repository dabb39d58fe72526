"""The processes that train one model together, and the few things they say to each other.

Every process must say the same things in the same order. What is said depends on nothing but the step, the settings and
what was agreed on before, so that it does. A process that is gone, or that stays away for longer than the process group's
timeout, is an error here: it names what was being exchanged, and nobody waits for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rkfac import compat

BUCKET = 1 << 25  # bytes that are added up at once: enough to be worth a message, few enough to begin early


@dataclass(eq=False)
class World:
    """A process group and this process's place in it; `size` 1: nobody else is there, and nothing is said."""

    rank: int = 0
    size: int = 1
    group: Any = None
    meeting: Any = None  # torch's own object of the group, which another group of the same size is not
    sent: Counter[str] = field(default_factory=Counter)  # bytes by what they were for, as this process handed them over

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    def told(self, mine: Any, what: str) -> list[Any]:
        """What every process says, in the order of their ranks: small things, of any kind that can be pickled."""
        found: list[Any] = [None] * self.size
        with self.exchanging(what):
            distributed.all_gather_object(found, mine, group=self.group)
        return found

    def gathered(self, numbers: Sequence[float], device: torch.device, what: str) -> list[list[float]]:
        """As many numbers from everybody, a list a process."""
        if self.alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.exchanging(what):
            distributed.all_gather(found, mine, group=self.group)
        self.sent["agreement"] += mine.nbytes
        return [one.tolist() for one in found]

    def mean(self, number: float, what: str) -> float:
        """Over all processes."""
        return number if self.alone else sum(self.told(number, what)) / self.size

    def summed(self, tensors: Sequence[Tensor], what: str, to: Sequence[int] | None = None) -> list[Tensor]:
        """Sums over all processes, the same bits for everybody; each bucket is under way while the next is filled.

        `to`: for which process each is; what the others get of it means nothing.
        """
        found: dict[int, Tensor] = {}
        waiting = []
        with self.exchanging(what):
            for numbers, rank in self._parcels(tensors, to):
                some = [tensors[number] for number in numbers]
                flat = torch.cat([t.reshape(-1) for t in some])
                if rank is None:
                    waiting.append(distributed.all_reduce(flat, group=self.group, async_op=True))
                else:
                    waiting.append(distributed.reduce(flat, group=self.group, group_dst=rank, async_op=True))
                self.sent["statistics"] += flat.nbytes
                parts = flat.split([t.numel() for t in some])
                found |= {n: part.view(t.shape) for n, part, t in zip(numbers, parts, some, strict=True)}
            for work in waiting:
                work.wait()
        return [found[number] for number in range(len(tensors))]

    def _parcels(self, tensors: Sequence[Tensor], to: Sequence[int] | None) -> Iterator[tuple[list[int], int | None]]:
        """Numbers of the tensors that travel together, and for whom."""
        for rank in [None] if to is None else range(self.size):
            numbers = [n for n in range(len(tensors)) if to is None or to[n] == rank]
            at = iter(numbers)
            for some in buckets([tensors[n] for n in numbers]):
                yield [next(at) for _ in some], rank

    def lent(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        """One process's tensor for everybody, in place."""
        with self.exchanging(what):
            distributed.broadcast(tensor, group=self.group, group_src=owner)
        return tensor

    def spread(self, mine: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        """Bytes of every process for everybody; `sizes` says how many each has."""
        buffers = [
            mine if rank == self.rank else torch.empty(size, dtype=torch.uint8, device=mine.device)
            for rank, size in enumerate(sizes)
        ]
        with self.exchanging(what):
            under_way = [
                distributed.broadcast(buffer, group=self.group, group_src=rank, async_op=True)
                for rank, buffer in enumerate(buffers)
                if buffer.numel()
            ]
            for work in under_way:
                work.wait()
        self.sent["decompositions"] += mine.nbytes
        return buffers

    def swapped(self, mine: Tensor, going: Sequence[int], coming: Sequence[int], what: str) -> Tensor:
        """Bytes for every process, so many to each, against theirs, so many from each, in the order of their ranks."""
        if self.alone:
            return mine
        found = mine.new_empty(sum(coming))
        with self.exchanging(what):
            distributed.all_to_all_single(found, mine, list(coming), list(going), group=self.group)
        self.sent["rows"] += mine.nbytes
        return found

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Errors of torch's say which socket broke; add what was being said, and that all must stop."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"process {self.rank} of {self.size} could not exchange {what}: another process has failed, was stopped, or "
                f"did not get here within the process group's timeout ({error}). Stop all processes and resume them from a "
                "checkpoint."
            ) from error


ALONE = World()


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one precision, together no larger than a bucket unless one of them is."""
    some: list[Tensor] = []
    for tensor in tensors:
        if some and (some[0].dtype != tensor.dtype or sum(t.nbytes for t in some) + tensor.nbytes > BUCKET):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some


def world_of(model: nn.Module, group: Any) -> World:
    """The processes that train this model: those of `group`, of its wrapper, or all there are.

    `group` False: this process trains by itself, whoever else is there.
    """
    if group is False or not distributed.is_available() or not distributed.is_initialized():
        if group not in (None, False):
            raise ValueError("process_group= needs torch.distributed.init_process_group first")
        return ALONE
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    if compat.inside_join(model):
        raise RuntimeError(
            "model.join() lets processes without data stay away, and the statistics of a step need all of them: give every "
            "process as many batches (a DistributedSampler does), or say process_group=False"
        )
    size = distributed.get_world_size(group)
    if size < 1:
        raise ValueError("this process is not part of process_group=: build the optimizer in its processes alone")
    meeting = distributed.group.WORLD if group is None else group
    return World(distributed.get_rank(group), size, group, meeting) if size > 1 else ALONE

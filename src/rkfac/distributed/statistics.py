"""Statistics of the global batch: what the processes have seen, added up before it enters anybody's averages.

The loss that is trained on is the mean over the processes of their own, as DistributedDataParallel has it. A process is
then what a pass of gradient accumulation with loss / W is: rows, samples and positions add up, and whoever undoes the
scaling of a gradient must know of the W as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block
from rkfac.curvature.factor import Factor
from rkfac.curvature.moment import Moment
from rkfac.distributed.early import Early
from rkfac.distributed.ownership import Ownership
from rkfac.distributed.world import World

ELSEWHERE = "another process found that its statistics do not describe its gradient"
NOTHING = -(2.0**20)  # an exponent below all


@dataclass
class Pooled:
    """What all processes together know of the layers, by name."""

    seen: set[str] = field(default_factory=set)  # of which somebody saw a call
    spoilt: list[str] = field(default_factory=list)  # whose statistics were not finite somewhere


def pool(blocks: Collection[Block], ownership: Ownership, early: Early, seen: Callable[[Block], bool]) -> Pooled:
    """Let every block's pending statistics be those of all processes; what left `early` is not sent again.

    What is not finite in one process is left out in all. A block that was retired in one is retired in all.
    """
    blocks, found, world = list(blocks), Pooled(), ownership.world
    for block in blocks:
        block.conform()  # also where no call was seen: shapes must be the same everywhere
    ownership.settle(blocks)
    early.finish()
    headers = [
        _header(block, own, seen(block), early.holds(block))
        for block, own in zip(blocks, _settled(blocks), strict=True)
    ]
    numbers = [number for header in headers for number in header]
    rows = world.gathered(numbers, blocks[0].weight.device, "how much they have seen")
    shared: list[_Summand] = []
    pooled: list[Block] = []
    at = 0
    for block, header in zip(blocks, headers, strict=True):
        theirs = [row[at : at + len(header)] for row in rows]
        at += len(header)
        sent = all(row[3] for row in theirs)
        if not _agreed(block, theirs, found):
            continue
        fresh = not (sent and _taken(block, early, _alive(block, theirs)))  # in the units of the last statistics
        early.learn({block.name: _exponents(block, theirs)})
        if fresh:
            pooled.append(block)
            owners = [ownership.owner(block, side) for side, factor in block.factors.items() if factor.learns]
            # Where a layer has other sums than one a factor, nobody owns any.
            owners = owners if any(owner is not None for owner in owners) else [None] * len(block.summands())
            summands = zip(block.summands(), _exponents(block, theirs), owners, strict=True)
            shared += [_Summand(*pair, exponent, owner) for pair, exponent, owner in summands]
    if pooled:
        _add_up(pooled, shared, world)
    return found


def _alive(block: Block, theirs: Sequence[Sequence[float]]) -> list[bool]:
    """Which summands hold something in some process."""
    first = 4 + 4 * len(block.pending.parts)
    return [any(row[i] != NOTHING for row in theirs) for i in range(first, len(theirs[0]))]


def _taken(block: Block, early: Early, alive: Sequence[bool]) -> bool:
    """Let what left early stand for a block's statistics, where its units fit."""
    totals, units = early.totals(block, alive), early.units(block)
    if totals is None:
        return False
    for (factor, moment), total, exponent in zip(block.summands(), totals, units, strict=True):
        factor.pooled(moment, total, exponent)
    return True


@dataclass(frozen=True, eq=False)
class _Summand:
    """A moment, the factor whose layout it has, the exponent of its units, and who keeps the sum (None: everybody)."""

    factor: Factor[Any]
    moment: Moment
    exponent: int
    owner: int | None

    @property
    def sum(self) -> Tensor:
        """What this process has seen, as one tensor."""
        return self.factor.summed(self.moment, self.exponent)

    def trace(self) -> Tensor:
        """Of the same."""
        seen = self.moment.exponent is not None
        trace = self.moment.trace() if seen else torch.zeros((), dtype=torch.float64, device=self.factor.device)
        return trace * 4.0**-self.exponent


def _add_up(pooled: Sequence[Block], shared: Sequence[_Summand], world: World) -> None:
    """The sums for everybody, and those that one process keeps for that one; their traces are for everybody too."""
    what = f"statistics of {_names(pooled)}"
    common, owned = ([s for s in shared if (s.owner is None) is everybody] for everybody in (True, False))
    traces = [torch.stack([summand.trace() for summand in owned])] if owned else []
    beside = [t for block in pooled for t in block.beside()]
    totals = iter(world.summed([*(summand.sum for summand in common), *beside, *traces], what))
    for summand in common:
        summand.factor.pooled(summand.moment, next(totals), summand.exponent)
    for block in pooled:
        block.pooled_beside([next(totals) for _ in block.beside()])
    if not owned:
        return
    mine = world.summed([summand.sum for summand in owned], what, [s.owner or 0 for s in owned])
    for summand, total, trace in zip(owned, mine, next(totals), strict=True):
        if summand.owner == world.rank:
            summand.factor.pooled(summand.moment, total, summand.exponent)
        else:
            summand.moment.left(trace, summand.exponent)


def _settled(blocks: Sequence[Block]) -> list[bool]:
    """Whether what each has seen here is finite; one synchronisation for all."""
    readings = [[t for _, moment in block.summands() for t in moment.readings()] for block in blocks]
    beside = [[t.sum() for t in block.beside()] for block in blocks]
    asked = [t.double().reshape(()) for own, more in zip(readings, beside, strict=True) for t in (*own, *more)]
    numbers = torch.stack(asked).tolist() if asked else []
    finite, at = [], 0
    for block, more in zip(blocks, beside, strict=True):
        fine = True
        for _, moment in block.summands():
            fine &= moment.settle(numbers[at : at + moment.numbers])
            at += moment.numbers
        fine &= all(-float("inf") < n < float("inf") for n in numbers[at : at + len(more)])
        at += len(more)
        finite.append(fine)
    return finite


def _header(block: Block, finite: bool, seen: bool, sent: bool) -> list[float]:
    """What is said of a block before anything is added up; the same length everywhere."""
    counts = [float(n) for part in block.pending.parts for n in part.counts()]
    exponents = [NOTHING if m.exponent is None else float(m.exponent) for _, m in block.summands()] if finite else None
    return [
        float(finite),
        float(bool(block.retired)),
        float(seen),
        float(sent),
        *counts,
        *(exponents or [NOTHING] * len(block.summands())),
    ]


def _agreed(block: Block, theirs: Sequence[Sequence[float]], found: Pooled) -> bool:
    """Take over what all say of a block; whether there is something to add up."""
    finite, retired, seen = ([bool(row[i]) for row in theirs] for i in range(3))
    if any(seen):
        found.seen.add(block.name)
    if any(retired):
        block.retired = block.retired or ELSEWHERE
        block.discard()
        return False
    parts = block.pending.parts
    totals = [int(sum(row[4 + i] for row in theirs)) for i in range(4 * len(parts))]
    if not totals[1]:
        return False  # nobody has rows
    if not all(finite):
        block.discard()
        found.spoilt.append(block.name)
        return False
    for i, part in enumerate(parts):
        part.stand_for(*totals[4 * i : 4 * i + 4])
    return True


def _exponents(block: Block, theirs: Sequence[Sequence[float]]) -> list[int]:
    """Of the units in which each summand is added up: the largest of all."""
    first = 4 + 4 * len(block.pending.parts)
    largest = [max(row[i] for row in theirs) for i in range(first, len(theirs[0]))]
    return [0 if exponent == NOTHING else int(exponent) for exponent in largest]


def _names(blocks: Sequence[Block]) -> str:
    names = [block.name for block in blocks]
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more layers" if len(names) > 3 else "")

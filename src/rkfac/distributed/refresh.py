"""Refreshes shared out: every process decomposes its part of the factors and gets the others' results.

What is sent are eigenpairs, O(d r) numbers a factor, where their inverses would be d^2. Averages, settings and seeds are
the same everywhere, so that it makes no difference who does which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rkfac.curvature.block import Block, Group
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import Factor, Refreshed
from rkfac.distributed.assignment import assigned
from rkfac.distributed.ownership import Ownership
from rkfac.distributed.parcels import Label, label, opened, packed, size
from rkfac.linalg import DecompositionError


@dataclass(frozen=True, eq=False)
class Task:
    """One factor to be decomposed."""

    block: Block
    side: str
    factor: Factor[Any]
    request: Request


def refresh(due: Sequence[tuple[Block, Group]], ownership: Ownership) -> None:
    """What every block's own `refresh` does, with the expensive part shared out."""
    if ownership.world.alone:
        for block, group in due:
            block.refresh(group)
        return
    tasks = [
        Task(block, side, *asked)
        for block, group in due
        for side, asked in zip(block.factors, block.asked(group), strict=False)  # all of them, or none
    ]
    made: dict[int, list[Refreshed[Any] | DecompositionError]] = {}
    for task, result in zip(tasks, _exchanged(tasks, ownership) if tasks else (), strict=True):
        made.setdefault(id(task.block), []).append(result)
    for block, group in due:
        found = made.get(id(block))
        failed = next((one for one in found or () if isinstance(one, DecompositionError)), None)
        done = None if found is None else [one for one in found if isinstance(one, Refreshed)]
        block.refresh(group, failed or done)


def _doers(tasks: Sequence[Task], ownership: Ownership) -> list[int]:
    """Who keeps an average decomposes it; what everybody has goes to whoever has least to do."""
    found = [ownership.owner(task.block, task.side) for task in tasks]
    costs = [float(task.factor.refresh_cost) for task in tasks]
    load = [0.0] * ownership.world.size
    for owner, cost in zip(found, costs, strict=True):
        if owner is not None:
            load[owner] += cost
    others = iter(assigned([cost for owner, cost in zip(found, costs, strict=True) if owner is None], load))
    return [next(others) if owner is None else owner for owner in found]


def _exchanged(tasks: Sequence[Task], ownership: Ownership) -> list[Refreshed[Any] | DecompositionError]:
    """The result of every task, or why it failed where it was tried."""
    world, who = ownership.world, _doers(tasks, ownership)
    mine = {number: _tried(task) for number, task in enumerate(tasks) if who[number] == world.rank}
    finished = {n: tasks[n].factor.packed(one) for n, one in mine.items() if isinstance(one, Refreshed)}
    # Small things first: what failed and why, and what the bytes are that follow.
    said: dict[int, Label | str] = {n: label(finished[n]) if n in finished else str(one) for n, one in mine.items()}
    what = f"decompositions of {len({id(task.block) for task in tasks})} layers, among them {tasks[0].block.name!r}"
    everybody = world.told(said, what)
    sizes = [sum(size(one) for one in theirs.values() if not isinstance(one, str)) for theirs in everybody]
    buffers = world.spread(packed(finished.values(), tasks[0].block.weight.device), sizes, what)
    results: dict[int, Refreshed[Any] | DecompositionError] = {}
    for theirs, buffer in zip(everybody, buffers, strict=True):
        at = 0
        for number, one in theirs.items():
            if isinstance(one, str):
                results[number] = DecompositionError(one)
                continue
            # Its own as well: another order of the same numbers in memory may give other last digits in products.
            results[number] = tasks[number].factor.unpacked(opened(one, buffer[at : at + size(one)]))
            at += size(one)
    return [results[number] for number in range(len(tasks))]


def _tried(task: Task) -> Refreshed[Any] | DecompositionError:
    with task.block.timed("refresh"):
        try:
            return task.factor.refresh(task.request)
        except DecompositionError as error:
            return error

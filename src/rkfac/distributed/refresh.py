"""Refreshes shared out: every process decomposes its part of the factors and gets the others' results.

What is sent are eigenpairs, O(d r) numbers a factor, where their inverses would be d^2. Averages, settings and seeds are
the same everywhere, so that it makes no difference who does which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block, Group
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import Factor, Refreshed
from rkfac.distributed.assignment import assigned
from rkfac.distributed.ownership import Ownership
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
    mine: dict[int, Refreshed[Any] | DecompositionError] = {}
    for number, task in enumerate(tasks):
        if who[number] == world.rank:
            with task.block.timed("refresh"):
                mine[number] = _tried(task)
    parcel = {n: str(one) if isinstance(one, DecompositionError) else _parts(tasks[n], one) for n, one in mine.items()}
    labels = {n: one if isinstance(one, str) else _label(one) for n, one in parcel.items()}
    what = f"decompositions of {len({id(task.block) for task in tasks})} layers, among them {tasks[0].block.name!r}"
    everybody = world.told(labels, what)
    packed = [t for one in parcel.values() if not isinstance(one, str) for t in one.values() if isinstance(t, Tensor)]
    device = tasks[0].block.weight.device
    mail = (
        torch.cat([_bytes(t, device) for t in packed]) if packed else torch.empty(0, dtype=torch.uint8, device=device)
    )
    sizes = [sum(_size(label) for label in theirs.values() if not isinstance(label, str)) for theirs in everybody]
    buffers = world.spread(mail, sizes, what)
    results: dict[int, Refreshed[Any] | DecompositionError] = {}
    for theirs, buffer in zip(everybody, buffers, strict=True):
        at = 0
        for number, label in theirs.items():
            if isinstance(label, str):
                results[number] = DecompositionError(label)
                continue
            size = _size(label)
            # Its own as well: another order of the same numbers in memory may give other last digits in products.
            results[number] = tasks[number].factor.unpacked(_opened(label, buffer[at : at + size]))
            at += size
    return [results[number] for number in range(len(tasks))]


def _tried(task: Task) -> Refreshed[Any] | DecompositionError:
    try:
        return task.factor.refresh(task.request)
    except DecompositionError as error:
        return error


# --- tensors as bytes

Label = Sequence[tuple[str, Any]]  # names with (dtype, shape) of a tensor, or with a value that is none


def _parts(task: Task, made: Refreshed[Any]) -> Mapping[str, Any]:
    return task.factor.packed(made)


def _label(parts: Mapping[str, Any]) -> Label:
    return [(k, (v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else v) for k, v in parts.items()]


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _size(label: Label) -> int:
    return sum(_elements(v[1]) * v[0].itemsize for _, v in label if isinstance(v, tuple))


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device).contiguous().reshape(-1).view(torch.uint8)


def _opened(label: Label, buffer: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    for name, value in label:
        if not isinstance(value, tuple):
            found[name] = value
            continue
        dtype, shape = value
        size = _elements(shape) * dtype.itemsize
        # A copy begins where its own memory does, wherever the bytes lay in the mail.
        found[name] = buffer[at : at + size].clone().view(dtype).reshape(shape)
        at += size
    return found

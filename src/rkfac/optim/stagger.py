"""Refreshes spread over a period, so that no step stalls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from rkfac.curvature.block import Block


def turns(blocks: Iterable[Block], group_of: Callable[[Block], Mapping[str, Any]]) -> dict[str, int]:
    """The step of its period at which each layer is refreshed. Of shapes and periods alone: a resumed run has the same."""
    sharing: dict[int, list[Block]] = {}
    for block in blocks:
        sharing.setdefault(group_of(block)["inverse_every"], []).append(block)
    chosen: dict[str, int] = {}
    for period, together in sharing.items():
        costs = tuple(block.refresh_cost for block in together)
        chosen |= zip((block.name for block in together), offsets(costs, period), strict=True)
    return chosen


@lru_cache(maxsize=32)
def offsets(costs: tuple[float, ...], period: int) -> tuple[int, ...]:
    """At which step of a period each layer is refreshed: steps evenly apart, and the work on them as even as it can be.

    The dearest first, each onto the step that has the least to do.
    """
    steps = min(len(costs), period)
    loads, chosen = [0.0] * steps, [0] * len(costs)
    for layer in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        loads[least] += costs[layer]
        chosen[layer] = least * period // steps
    return tuple(chosen)

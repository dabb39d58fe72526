"""Refreshes spread over a period, so that no step stalls."""

from __future__ import annotations

from functools import lru_cache


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

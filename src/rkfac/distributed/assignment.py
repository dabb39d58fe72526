"""Who does which piece of work."""

from __future__ import annotations

from collections.abc import Sequence


def assigned(costs: Sequence[float], load: list[float]) -> list[int]:
    """Longest first, each to whoever has least to do; `load` is what everybody has to do before, and afterwards.

    The last to end then has at most a third more to do than in the best assignment there is. More processes than pieces
    leave some without any.
    """
    found = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        found[piece] = min(range(len(load)), key=lambda rank: (load[rank], rank))
        load[found[piece]] += costs[piece]
    return found

"""Seconds of a step in many processes, on paper: from what one process takes, the bytes that are sent, and a bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rkfac.distributed.assignment import assigned


@dataclass(frozen=True)
class Alone:
    """What one process takes for the whole batch, and what several hand over; seconds and bytes of one of each.

    `rest`: what every process does with the whole model, whatever its share. `costs`: of decomposing each factor.
    """

    passes: float
    statistics: float
    refresh: float
    rest: float
    every: Mapping[str, int]
    sent: Mapping[str, int]
    costs: Sequence[float]


@dataclass(frozen=True)
class Machine:
    """`bandwidth`: bytes a second into and out of a process; `latency`: seconds until a message is there.

    `cores`: processes beyond them take turns.
    """

    bandwidth: float
    latency: float = 0.0
    cores: int | None = None


def predicted(alone: Alone, machine: Machine, processes: int, *, grows: bool = False) -> dict[str, float]:
    """Seconds of an amortised step by part; `grows`: every process has a batch like the one that was measured.

    Of a sum a process sends 2 (W - 1) / W of its bytes, in 2 log2(W) messages; a decomposition is sent whole to everybody.
    Nothing is hidden behind computing, and nothing waits for anything but the longest share of the refreshes.
    """
    collect = 1 / alone.every["statistics"] if "statistics" in alone.every else 0.0
    renew = 1 / alone.every["refresh"] if "refresh" in alone.every else 0.0
    turns = max(1.0, processes / machine.cores) if machine.cores else 1.0
    share = 1.0 if grows else 1 / processes
    ring = 2 * (processes - 1) / processes / machine.bandwidth
    others = (processes - 1) / processes / machine.bandwidth
    delay = 2 * math.ceil(math.log2(processes)) * machine.latency
    return {
        "passes": turns * share * alone.passes,
        "statistics": turns * share * alone.statistics * collect,
        "refresh": turns * longest_share(alone.costs, processes) * alone.refresh * renew,
        "rest": turns * alone.rest,
        "gradients sent": delay + ring * alone.sent["gradients"],
        "statistics sent": (delay + ring * alone.sent["statistics"]) * collect,
        "decompositions sent": (delay + others * alone.sent["decompositions"]) * renew,
    }


def longest_share(costs: Sequence[float], processes: int) -> float:
    """Of all decompositions, what the process does that has most to do."""
    if not costs:
        return 1.0
    loads = [0.0] * processes
    for cost, owner in zip(costs, assigned(costs, [0.0] * processes), strict=True):
        loads[owner] += cost
    return max(loads) / sum(costs)

"""Interleaved timing: every contestant once a round, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(contestants: Mapping[str, Callable[[], Any]], rounds: int, settle: float = 0.25) -> dict[str, float]:
    """Median seconds of each contestant over `rounds` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            time.sleep(settle)  # idle workers of another library's thread pool spin for a while
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}

"""Interleaved timing: every contestant once a round, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A median and the two quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of some measurements."""
        low, median, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
        return cls(median, low, high)

    @classmethod
    def through(cls, function: Callable[[Mapping[str, float]], float], parts: Mapping[str, Spread]) -> Spread:
        """What a sum of parts is at all medians, all lower and all upper quartiles: wider than its own quartiles."""
        levels = ("median", "low", "high")
        return cls(*(function({name: getattr(part, level) for name, part in parts.items()}) for level in levels))

    def __str__(self) -> str:
        """Three digits of the median, and half the distance between the quartiles in per cent of it."""
        return f"{digits(self.median)} ±{50 * (self.high - self.low) / max(self.median, 1e-12):.0f}%"


def digits(value: float) -> str:
    """Three digits without an exponent: 0.00123, 1.23, 123, 1234."""
    return f"{value:.0f}" if value >= 100 else np.format_float_positional(value, 3, fractional=False, trim="-")


def interleaved(contestants: Mapping[str, Callable[[], Any]], rounds: int, settle: float = 0.25) -> dict[str, Spread]:
    """Seconds of each contestant over `rounds` rounds."""
    return in_turns({name: partial(_seconds, run) for name, run in contestants.items()}, rounds, settle)


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int, settle: float = 0.25) -> dict[str, Spread]:
    """The same for contestants that tell their seconds themselves, because some of what they do does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            time.sleep(settle)  # idle workers of another library's thread pool spin for a while
            seconds[name].append(run())
    return {name: Spread.of(values) for name, values in seconds.items()}

"""Seconds spent in the phases of a layer's work, on the device that does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Host time for work on the CPU; a pair of events on the stream for work that a GPU does later.

    Nothing waits while a step runs: events are read when `seconds` is asked for, and those that have passed now and then
    before, lest they pile up.
    """

    def __init__(self, phases: Iterable[str], event: Callable[[], Any] | None = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._total = dict.fromkeys(phases, 0.0)
        self._running: list[tuple[str, Any, Any]] = []
        self.began: float | None = None  # when the first was timed, by the host's clock

    def add(self, phase: str, seconds: float) -> None:
        """Count what was done for several at once."""
        self._total[phase] += seconds

    @contextmanager
    def timed(self, phase: str, device: torch.device) -> Iterator[None]:
        """Count what happens inside."""
        if self.began is None:
            self.began = time.perf_counter()
        if device.type != "cuda":
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._total[phase] += time.perf_counter() - begin
            return
        with torch.cuda.device(device):
            start, end = self._event(), self._event()
            start.record()
            try:
                yield
            finally:
                end.record()
                self._running.append((phase, start, end))
                if len(self._running) >= 64:
                    self._collect()

    def seconds(self) -> dict[str, float]:
        """By phase, once the device has done all that was counted."""
        for _, _, end in self._running:
            end.synchronize()
        self._collect()
        return dict(self._total)

    def _collect(self) -> None:
        """Add up what has passed."""
        passed = [entry for entry in self._running if entry[2].query()]
        for phase, start, end in passed:
            self._total[phase] += start.elapsed_time(end) / 1000
        self._running = [entry for entry in self._running if entry not in passed]

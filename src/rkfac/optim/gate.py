"""The last gate before a parameter: what is not finite passes nowhere, whatever produced it.

What is refused takes no part in the step, the rest of the step is complete (momentum and weight decay of the refused
parameters included). On a CPU refusals are noticed at once; on other devices nothing waits for the device: a refused
update becomes zero there, and its name is told at the next statistics step, which reads numbers from the device anyway.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from rkfac.linalg import Number, Truth, at_once, peak
from rkfac.optim.report_text import listed


class Gate:
    """Counts refusals in a row by name; `max_failures` of them are an error, raised before any parameter moves."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.counts: dict[str, int] = {}  # refusals in a row
        self._on_device: dict[str, Tensor] = {}  # refusals in a row, and all since the last report
        self._refused: list[str] = []

    def passes(self, name: str, finite: Truth) -> Truth:
        """Whether an update may go on: a plain truth value on a CPU, one on the device elsewhere."""
        if isinstance(finite, Tensor) and not at_once(finite):
            before = self._on_device.get(name, torch.zeros(2, dtype=torch.int64, device=finite.device))
            healthy = torch.stack([torch.zeros_like(before[0]), before[1]])
            self._on_device[name] = torch.where(finite, healthy, before + 1)
            return finite
        passed = bool(finite)
        self.counts[name] = 0 if passed else self.counts.get(name, 0) + 1
        if not passed:
            self._refused.append(name)
        return passed

    def healthy(self, name: str) -> None:
        """An update is known to be fine."""
        self.counts[name] = 0

    def mended(self, buffer: Tensor, factor: float) -> Truth:
        """Whether a buffer times a factor is finite; otherwise it becomes zero, to be refused once and not for ever."""
        finite = moderate(torch.view_as_real(buffer) if buffer.is_complex() else buffer, False, factor)
        if isinstance(finite, Tensor):
            buffer.copy_(torch.where(finite, buffer, torch.zeros_like(buffer)))
        elif not finite:
            buffer.zero_()
        return finite

    def report(self, deeper: int = 0) -> None:
        """Say what was refused since the last report; an error when it happened too often in a row.

        `deeper`: frames between here and the optimizer's update.
        """
        refused, self._refused = self._refused, []
        if not refused:
            return
        worst = max(refused, key=lambda name: self.counts[name])
        if self.counts[worst] >= self.max_failures:
            times, self.counts = self.counts[worst], {}
            raise RuntimeError(
                f"the update of {listed(refused)} was NaN, Inf or beyond all numbers {times} times in a row. Model and "
                "optimizer are intact: save them, then lower the learning rate, raise the damping or look at the loss."
            )
        text = f"updates with NaN, Inf or beyond all numbers were left out for {listed(refused)}"
        warnings.warn(text, stacklevel=6 + deeper)

    # --- other devices

    def readings(self) -> list[Tensor]:
        """Numbers to read along with the statistics."""
        return [number for counts in self._on_device.values() for number in counts.double().unbind()]

    def settle(self, numbers: Sequence[float]) -> None:
        """What `readings` were."""
        for name, in_a_row, since in zip(self._on_device, numbers[0::2], numbers[1::2], strict=True):
            self.counts[name] = int(in_a_row)
            if since:
                self._refused.append(name)
        self._on_device = {
            name: torch.stack([counts[0] % self.max_failures, torch.zeros_like(counts[1])])
            for name, counts in self._on_device.items()
        }


def bounded(length: Number, dtype: torch.dtype) -> Truth:
    """Whether an update of this length is a number, with room for a momentum buffer to add up many of them."""
    room = 1e-3 if torch.finfo(dtype).max > 1e6 else 1.0  # a length of 65 is nothing special in float16
    return length < torch.finfo(dtype).max * room  # False for NaN as well


def moderate(gradient: Tensor, squared: bool, factor: float = 1.0) -> Truth:
    """Whether every entry of a gradient is finite, times a factor too, and, if it will be squared, its square."""
    if gradient.numel() == 0:
        return True
    largest = peak(gradient) < most(gradient.dtype, squared, factor)
    return bool(largest) if at_once(largest) else largest


def most(dtype: torch.dtype, squared: bool, factor: float = 1.0) -> float:
    """What the entries of a gradient or buffer must stay below."""
    largest = torch.finfo(dtype).max * 1e-3 / factor
    return math.sqrt(largest) if squared else largest

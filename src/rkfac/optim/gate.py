"""The last gate before a parameter: what is not finite passes nowhere, whatever produced it.

What is refused takes no part in the step, the rest of the step is complete (momentum and weight decay of the refused
parameters included). On a CPU refusals are noticed at once; on other devices nothing waits for the device: a refused
update becomes zero there, and its name is told at the next statistics step, which reads numbers from the device anyway.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from rkfac.optim.report import listed


class Gate:
    """Counts refusals in a row by name; `max_failures` of them are an error, raised before anything is touched."""

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.counts: dict[str, int] = {}
        self._on_device: dict[str, Tensor] = {}
        self._refused: list[str] = []

    def passes(self, name: str, finite: Tensor) -> bool | Tensor:
        """Whether an update may go on: a plain truth value on a CPU, one on the device elsewhere."""
        if finite.device.type != "cpu":
            before = self._on_device.get(name, torch.zeros((), dtype=torch.int64, device=finite.device))
            self._on_device[name] = torch.where(finite, torch.zeros_like(before), before + 1)
            return finite
        passed = bool(finite)
        self.counts[name] = 0 if passed else self.counts.get(name, 0) + 1
        if not passed:
            self._refused.append(name)
        return passed

    def report(self) -> None:
        """Say what was refused since the last report; an error when it happened too often in a row."""
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
        warnings.warn(f"updates with NaN or Inf were left out for {listed(refused)}", stacklevel=6)

    # --- other devices

    def readings(self) -> list[Tensor]:
        """Numbers to read along with the statistics."""
        return [count.double() for count in self._on_device.values()]

    def settle(self, numbers: Iterable[float]) -> None:
        """What `readings` were."""
        for name, number in zip(self._on_device, numbers, strict=True):
            self.counts[name] = int(number)
            if number:
                self._refused.append(name)


def bounded(length: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether an update of this length is a number, with room for a momentum buffer to add up many of them."""
    return length < torch.finfo(dtype).max * 1e-3  # False for NaN as well


def moderate(gradient: Tensor, squared: bool) -> Tensor:
    """Whether every entry of a gradient is finite and, if it will be squared, its square too."""
    if gradient.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=gradient.device)
    largest = torch.finfo(gradient.dtype).max * 1e-3
    low, high = torch.aminmax(gradient)
    return torch.maximum(-low, high) < (math.sqrt(largest) if squared else largest)

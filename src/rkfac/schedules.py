"""Schedules of any hyper-parameter, with a state_dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer


class Schedule(Protocol):
    """A hyper-parameter as a function of the epoch, counted from 1."""

    def __call__(self, epoch: int) -> Any:
        """The value in force during that epoch."""


class Steps:
    """Constant pieces: `Steps({1: 0.1, 25: 0.05})` is 0.1 in epochs 1 to 24 and 0.05 from 25 on."""

    def __init__(self, pieces: Mapping[int, Any]) -> None:
        if 1 not in pieces:
            raise ValueError("a Steps schedule must say what holds from epoch 1 on")
        for epoch in pieces:
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
                raise ValueError(f"epochs in a Steps schedule are integers counted from 1, got {epoch!r}")
        self.pieces = dict(sorted(pieces.items()))

    def __call__(self, epoch: int) -> Any:
        """The piece the epoch lies in."""
        return self.pieces[max(start for start in self.pieces if start <= epoch)]

    def __repr__(self) -> str:
        return f"Steps({self.pieces})"


class Polynomial:
    """`start` (1 - e / epochs)^power, e being the epochs that are over: `Polynomial(0.05, 75, 6)` is SENG's in the paper.

    At the beginning of epoch 1, e is 0; the published rate of a step inside of an epoch is `schedule(1 + steps / all)`.
    """

    def __init__(self, start: float, epochs: float, power: float) -> None:
        for name, value in (("start", start), ("epochs", epochs), ("power", power)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} of a Polynomial schedule must be a number greater than zero, got {value!r}")
        self.start, self.epochs, self.power = start, epochs, power

    def __call__(self, epoch: float) -> float:
        """The value when `epoch` - 1 epochs are over; zero from the last one on."""
        return float(self.start * max(0.0, 1 - (epoch - 1) / self.epochs) ** self.power)

    def __repr__(self) -> str:
        return f"Polynomial({self.start}, {self.epochs}, {self.power})"


class Scheduler:
    """Sets hyper-parameters of every parameter group from their schedules; `step()` once after each epoch.

    Works with any torch optimizer whose groups hold the names; those of epoch 1 are set at once.
    """

    def __init__(self, optimizer: Optimizer, **schedules: Schedule | Callable[[int], Any]) -> None:
        for name in schedules:
            if any(name not in group for group in optimizer.param_groups):
                known = ", ".join(k for k in optimizer.param_groups[0] if k != "params")
                raise ValueError(f"{type(optimizer).__name__} has no hyper-parameter {name!r}; it has {known}")
        self.optimizer = optimizer
        self.schedules = schedules
        self.epoch = 1
        self._apply()

    def _apply(self) -> None:
        for name, schedule in self.schedules.items():
            for group in self.optimizer.param_groups:
                group[name] = schedule(self.epoch)

    def step(self) -> None:
        """The next epoch begins."""
        self.epoch += 1
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """The epoch; schedules are code and come from the constructor."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue in a saved epoch."""
        self.epoch = int(state["epoch"])
        self._apply()

"""Shapes of the learning rate over a run, the same for every optimizer: pure functions of progress, so nothing is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .errors import unknown

WARM_UP = 0.05  # of all steps


@dataclass(frozen=True)
class Moment:
    """Where a run stands: the step it is about to take, of how many, and in which epoch; all counted from 1.

    `passed`: epochs, and parts of one, that are over when the step is done.
    """

    step: int
    steps: int
    epoch: int
    passed: float = 0.0


class Shape(Protocol):
    """A factor on the learning rate, None for none; one that `needs_total` is another in a run of another length."""

    needs_total: bool

    def __call__(self, moment: Moment) -> float | None: ...


class Constant:
    """The learning rate as it was given, or as a schedule sets it."""

    needs_total = False

    def __call__(self, moment: Moment) -> None:
        return None


class Linear:
    """Up over the first twentieth of the steps, then down; zero would come one step after the last, so none is idle."""

    needs_total = True

    def __call__(self, moment: Moment) -> float:
        rise = max(1, round(WARM_UP * moment.steps))
        if moment.step <= rise:
            return moment.step / rise
        return max(0.0, (moment.steps + 1 - moment.step) / (moment.steps + 1 - rise))


@dataclass(frozen=True)
class Epochs:
    """Factors by their first epoch; one before the first of them."""

    factors: Mapping[int, float]
    needs_total = False

    def __call__(self, moment: Moment) -> float:
        begun = [first for first in self.factors if first <= moment.epoch]
        return self.factors[max(begun)] if begun else 1.0


@dataclass(frozen=True)
class Polynomial:
    """(1 - e / epochs)^power, e being the epochs that are over, step by step."""

    epochs: float
    power: float
    needs_total = False

    def __call__(self, moment: Moment) -> float:
        return float(max(0.0, 1 - moment.passed / self.epochs) ** self.power)


SHAPES: dict[str, Shape] = {
    "linear": Linear(),
    "constant": Constant(),
    "steps-of-50-epochs": Epochs({13: 0.3, 18: 0.1, 27: 0.03, 40: 0.01}),  # the paper's, from its 3rd epoch on
    "sixth-power-of-75-epochs": Polynomial(75, 6),  # SENG's in the paper
}


def find(name: str) -> Shape:
    """The shape called `name`."""
    if name not in SHAPES:
        raise unknown("lr_shape", name, SHAPES)
    return SHAPES[name]


class ShapedRate:
    """Sets every group's learning rate to its own base, as the optimizer was built with it, times the shape's factor."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.shape, self.optimizer = find(name), optimizer
        self.bases = [group.get("lr") for group in optimizer.param_groups]

    def apply(self, moment: Moment) -> None:
        """Make the rate of `moment` the one in force; a group without a number as its rate is left alone."""
        factor = self.shape(moment)
        if factor is None:
            return
        for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
            if isinstance(base, int | float):
                group["lr"] = base * factor

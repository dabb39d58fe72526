"""Step schedules of any hyper-parameter: a pure function of the epoch, so nothing needs saving."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .errors import unknown

Steps = Mapping[int, float]  # first epoch of each value, counted from 1


def value_at(steps: Steps, epoch: int) -> float | None:
    """The value in force in `epoch`; None before the first step (the optimizer's own value stays)."""
    begun = [first for first in steps if first <= epoch]
    return steps[max(begun)] if begun else None


def apply(optimizer: torch.optim.Optimizer, schedules: Mapping[str, Steps], epoch: int) -> None:
    """Set every scheduled hyper-parameter of every parameter group to its value in `epoch`."""
    for name, steps in schedules.items():
        value = value_at(steps, epoch)
        for group in optimizer.param_groups:
            if name not in group:
                raise unknown("hyper-parameter to schedule", name, set(group) - {"params"})
            if value is not None:
                group[name] = value

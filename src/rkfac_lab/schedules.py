"""Step schedules of any hyper-parameter: a pure function of the epoch, so nothing needs saving."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from . import optimizers
from .config import OptimizerConfig
from .errors import LabError, unknown

Steps = Mapping[int, float]  # first epoch of each value, counted from 1


def value_at(steps: Steps, epoch: int) -> float | None:
    """The value in force in `epoch`; None before the first step (the optimizer's own value stays)."""
    begun = [first for first in steps if first <= epoch]
    return steps[max(begun)] if begun else None


def apply(optimizer: torch.optim.Optimizer, schedules: Mapping[str, Steps], epoch: int) -> None:
    """Set every scheduled hyper-parameter of every parameter group to its value in `epoch`."""
    for name, steps in schedules.items():
        value = value_at(steps, epoch)
        if value is not None:
            for group in optimizer.param_groups:
                group[name] = value


def check(
    schedules: Mapping[str, Steps], optimizer: torch.optim.Optimizer, chosen: OptimizerConfig, model: nn.Module
) -> None:
    """Refuse a name the optimizer does not know and a value its constructor would not take, whenever it is due."""
    for name in schedules:
        for group in optimizer.param_groups:
            # A word in a number's place, such as rank = "auto", may give way to a number; the constructor knows.
            numbers = {
                key for key, value in group.items() if value is None or isinstance(value, str) or _is_number(value)
            }
            if name not in numbers:
                raise unknown("hyper-parameter to schedule", name, numbers)
    if not schedules:
        return
    # Constructors check values, so they are asked, about a layer that costs nothing if they can do with it.
    small = nn.Linear(2, 2)
    probe = small if _refusal(chosen, small, {}) is None else model
    accepted = optimizers.keywords(chosen.name)
    for name, steps in schedules.items():
        for epoch, value in steps.items():
            refused = _refusal(chosen, probe, {name: value}) if name in accepted else None
            if refused is not None:
                raise LabError(f"schedule.{name}.{epoch} = {value!r} cannot be used: {refused}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(chosen: OptimizerConfig, model: nn.Module, changed: Mapping[str, float]) -> LabError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer that trains will say it
            built = optimizers.build(chosen.name, model, {**chosen.arguments, **changed})
    except LabError as error:
        return error
    if hasattr(built, "close"):
        built.close()
    return None

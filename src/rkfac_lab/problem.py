"""What a workload is: one problem with everything that is not the optimizer, ours or anybody's own."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .data import Dataset, Sources
from .errors import LabError, one_line
from .imports import named
from .optimizers import grafted, kin

Prepare = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """A goal whose first crossing is timed."""

    metric: str
    value: float
    mode: Literal["max", "min"]

    def reached(self, value: float | None) -> bool:
        """Whether a measured value meets the goal."""
        if value is None:
            return False
        return value >= self.value if self.mode == "max" else value <= self.value


@dataclass(frozen=True)
class Workload:
    """One problem, the same for every optimizer that is compared on it.

    Anybody's own is found as `module:NAME`, wherever a workload's name is taken.
    """

    name: str
    about: str
    model: Callable[[Dataset], nn.Module]
    data: Callable[[Sources], Dataset]
    batch_size: int
    epochs: int
    loss: Loss  # mean over samples
    targets: tuple[Target, ...]
    prepare: Prepare = lambda x, y: (x, y)  # stored tensors of a batch -> input and target of the model
    metrics: Mapping[str, Loss] = field(default_factory=dict)  # "test_..." -> mean over samples
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    channels_last: bool = False  # set where it was measured to be faster on a CPU
    threads: int | None = None  # None: torch's own choice; tiny layers are fastest with one
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # optimizer -> constructor arguments
    kfac_needs: Mapping[str, Any] = field(default_factory=dict)  # what K-FAC must be told for its mathematics to hold
    lr_shape: str = "linear"  # of any optimizer's learning rate over the run, by its name in `shapes`
    evaluate_steps: int | None = None  # also inside epochs, every so many steps
    evaluation_size: int | None = None  # test samples that are measured; None: all, where that costs little
    measured_on: str = "test"  # what the names of all measurements begin with
    compared: tuple[str, ...] = (
        "rs-kfac",
        "sre-kfac",
        "k-fac",
        "sgd",
        "adamw",
    )  # by `rkfac compare`, unless it is told

    def arguments(self, optimizer: str) -> dict[str, Any]:
        """The constructor's arguments for an optimizer here; `rs-kfac+sgd` gets sgd's, and what K-FAC needs.

        A K-FAC of somebody's own gets those of the K-FAC it is derived from.
        """
        own, other = grafted(optimizer)
        like = kin(own)
        needs = {} if like is None else self.kfac_needs
        if other is None:
            return {**needs, **self.defaults.get(own, self.defaults.get(like or own, {}))}
        return {**needs, **self.defaults.get(other, {}), "graft": other}


def own_part(kind: str, place: str, wanted: type) -> Callable[[Any], Any]:
    """The function in `place`, which makes a model of a Dataset, or a Dataset of Sources; anything else is refused."""
    make = named(kind, place, place)
    given = "the data, a Dataset" if kind == "model" else "where data is, a Sources"
    try:
        inspect.signature(make).bind(None)
    except (TypeError, ValueError):
        raise LabError(f"The {kind} {place} is no function of one argument ({given}); name one that is.") from None

    def made(known: Any) -> Any:
        try:
            found = make(known)
        except LabError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{PurePath(last.filename).name}, line {last.lineno}"
            raise LabError(
                f"The {kind} {place} failed in {where}: {one_line(error)}; it gets {given}, and returns a {wanted.__name__}."
            ) from error
        if not isinstance(found, wanted):
            raise LabError(
                f"The {kind} {place} returned a {type(found).__name__}, and a {wanted.__name__} belongs there."
            )
        return found

    return made

"""One network at several widths, and a walk: training by RS-KFAC while others look at the factors of some layers.

Who looks is an RS-KFAC of learning rate zero: it collects statistics of the same batches at the same weights and changes
nothing. So one walk serves every decay, and layers nobody looks at cost no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import rkfac
from rkfac.schedules import Scheduler
from rkfac_lab import models
from rkfac_lab.claims import paper
from rkfac_lab.data import Dataset, Sources
from rkfac_lab.data.batches import Batches
from rkfac_lab.workloads import Workload, find

NEVER = 10**9
LOOKING: dict[str, Any] = {
    "lr": 0.0,
    "graft": None,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "inverse_every": NEVER,
    "eager_start": False,
    "rank": 1,
    "oversampling": 0,
    "power_iterations": 0,
    "warm_start": False,
    "rows": None,
    "fallback": "sgd",
}


@dataclass(frozen=True)
class Pace:
    """How often the training has statistics and inverses, and how often those who look have statistics.

    `scheduled`: learning rate and damping go down as in Section 5.
    """

    statistics: int
    inverses: int
    watched: int
    scheduled: bool = False


# The paper's periods are 10 and 50, but here there are fewer steps; and those of Figure 1.
SHORT, FIGURE = Pace(10, 20, 1), Pace(30, 30, 30, scheduled=True)


@dataclass(frozen=True)
class Family:
    """Networks that differ in their width alone; `layers` are those that are looked at, by module and in words.

    `lr`: the paper's where there is BatchNorm; without, the loss of wide networks goes up with it at first. The claims measure
    both, because the rate decides much of what is seen.
    """

    workload: str
    build: Callable[[int, int], nn.Module]  # of width and classes
    layers: dict[str, str]
    about: str
    lr: float


def _mlp(pixels: int) -> Callable[[int, int], nn.Module]:
    return lambda width, classes: models.build("mlp", sizes=(pixels, width, width, classes))


def _vgg(width: int, classes: int) -> nn.Module:
    return models.build("vgg16bn", width=width / paper.WIDTH, classes=classes)


FAMILIES = {
    "vgg": Family(
        "cifar10-vgg16bn",
        _vgg,
        {"features.14": "5th convolution", "features.20": "7th convolution", "features.34": "11th convolution"},
        "VGG16_bn on CIFAR-10, by the channels of its widest layers (512 are the paper's)",
        0.3,
    ),
    "mlp": Family("fashion-widemlp", _mlp(784), {"3": "middle layer"}, "MLP 784-w-w-10 on Fashion-MNIST, by w", 0.03),
    "digits": Family("digits-mlp", _mlp(64), {"3": "middle layer"}, "MLP 64-w-w-10 on the embedded digits, by w", 0.03),
}


def workload(family: str, width: int) -> Workload:
    """The family's problem with a network of this width."""
    known = FAMILIES[family]

    def model(data: Dataset) -> nn.Module:
        return known.build(width, data.classes)

    return replace(find(known.workload), model=model)


class Walk:
    """Training with the paper's settings; averages are free of their start, so that the first inverses are of use."""

    def __init__(
        self,
        family: str,
        width: int,
        data_dir: str | None,
        batch: int,
        lr: float | None = None,
        seed: int = 0,
        pace: Pace = SHORT,
    ) -> None:
        """`lr`: another one than the family's."""
        self.problem = workload(family, width)
        self.data = self.problem.data(Sources(data_dir))
        torch.manual_seed(seed)
        self.model = self.problem.model(self.data)
        own = {"factor_start": "unbiased", "factor_every": pace.statistics, "inverse_every": pace.inverses}
        keywords = {**rkfac.paper_defaults(), **own, "lr": lr or FAMILIES[family].lr, "seed": seed}
        self.optimizer = rkfac.RSKFAC(self.model, **keywords)
        self.batches = Batches(self.data.train_x, self.data.train_y, batch, seed, self.problem.augment)
        self.pace = pace
        falling = {name: rkfac.paper_schedules()[name] for name in ("lr", "damping") if pace.scheduled}
        self.schedule = Scheduler(self.optimizer, **falling)
        self.watchers: list[rkfac.RSKFAC] = []
        self.loss = float("nan")  # of the last batch

    def watch(self, layers: Sequence[str], decay: float) -> rkfac.RSKFAC:
        """Somebody who looks at some layers from now on, all rows at every step, or every so many."""
        looked_at = [p for layer in layers for p in self.model.get_submodule(layer).parameters()]
        own = {"factor_decay": decay, "factor_start": "unbiased", "factor_every": self.pace.watched}
        settings: dict[str, Any] = {**LOOKING, **own}
        self.watchers.append(rkfac.RSKFAC(self.model, params=looked_at, **settings))
        return self.watchers[-1]

    def step(self) -> None:
        """One batch."""
        if self.batches.exhausted:
            if self.batches.position:  # an epoch is over; before the first one none is
                self.schedule.step()
            self.batches.shuffle()
        inputs, targets = self.problem.prepare(*self.batches.take())
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.model(inputs), targets)
        loss.backward()
        for one in (self.optimizer, *self.watchers):
            one.step()
        self.loss = float(loss.detach())

    def close(self) -> None:
        """Nobody listens to the model any longer."""
        for one in (self.optimizer, *self.watchers):
            one.close()

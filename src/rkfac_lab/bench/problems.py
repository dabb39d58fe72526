"""The problems that steps and memory are measured on: a model, its stream of batches, how many steps of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rkfac_lab import models
from rkfac_lab.bench import streams
from rkfac_lab.bench.streams import Batch
from rkfac_lab.errors import unknown


@dataclass(frozen=True)
class Problem:
    """A model with a pool of batches, and what a round of measurements on it consists of."""

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    stream: str  # what the batches are, in words
    rounds: int = 4
    warm_up: int = 12  # statistics steps before anything is timed, so that the averages are those of a training
    plain: int = 4  # steps of each kind a round; the refresh is one
    statistics: int = 4
    kfac: Mapping[str, Any] = field(default_factory=dict)  # what its loss asks of K-FAC

    def schedule(self, rounds: int | None = None) -> list[list[tuple[str, int]]]:
        """Kind of step and number of the batch for every step of the warm-up and of each round, alike for everybody."""
        warm_up = ["statistics"] * self.warm_up + ["refresh", "plain"]
        one_round = ["plain"] * self.plain + ["statistics"] * self.statistics + ["refresh"]
        number = iter(range(1 << 40))
        repeated = [one_round] * (self.rounds if rounds is None else rounds)
        return [[(kind, next(number)) for kind in kinds] for kinds in (warm_up, *repeated)]


def _vgg(width: float) -> Callable[[], nn.Module]:
    return lambda: models.build("vgg16bn", width=width)


PROBLEMS = {
    "mlp": Problem(
        "MLP 784-4096-4096-10, batch 256",
        lambda: nn.Sequential(nn.Flatten(), models.build("mlp", sizes=(784, 4096, 4096, 10))),
        lambda: streams.pictures(256, 1, 28),
        streams.DESCRIPTIONS["pictures"],
    ),
    "vgg16bn": Problem(
        "VGG16_bn, batch 256",
        _vgg(1.0),
        lambda: streams.pictures(256, 3, 32),
        streams.DESCRIPTIONS["pictures"],
        rounds=2,
        warm_up=6,
        statistics=2,
    ),
    "vgg-small": Problem(
        "VGG16_bn at a quarter of the width, batch 256",
        _vgg(0.25),
        lambda: streams.pictures(256, 3, 32),
        streams.DESCRIPTIONS["pictures"],
        warm_up=6,
    ),
    # Layers so small that operations cost more than flops.
    "small-mlp": Problem(
        "MLP 64-256-128-64-12-64-128-256-64, batch 100",
        lambda: models.build("mlp", sizes=(64, 256, 128, 64, 12, 64, 128, 256, 64)),
        lambda: streams.signals(100, 64, 64),
        streams.DESCRIPTIONS["signals"],
        plain=20,
        statistics=10,
    ),
    "resnet": Problem(
        "ResNet-20 at 16 x 16, batch 256",
        lambda: models.build("resnet"),
        lambda: streams.pictures(256, 3, 16),
        streams.DESCRIPTIONS["pictures"],
        warm_up=6,
    ),
    "transformer": Problem(
        "Transformer, width 512, 4 blocks, batch 8 x 256 tokens",
        lambda: models.build("transformer", vocabulary=96, context=256, width=512, depth=4, heads=8),
        lambda: streams.sentences(8, 256, 96),
        streams.DESCRIPTIONS["sentences"],
        kfac={"loss_average": "tokens"},
    ),
}


def named(names: Sequence[str]) -> list[Problem]:
    """The problems of these names."""
    for name in names:
        if name not in PROBLEMS:
            raise unknown("benchmark problem", name, PROBLEMS)
    return [PROBLEMS[name] for name in names]

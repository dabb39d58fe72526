"""What is fixed for the life of an optimizer, and when its periods are over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rkfac.curvature.damping import Damping
from rkfac.curvature.decompose import Decomposition, Request
from rkfac.curvature.factor import Start
from rkfac.curvature.randomness import Randomness

Group = Mapping[str, Any]

YOUNG = 50  # steps in which curvature changes fastest: each of them collects statistics under `eager_start`


@dataclass(frozen=True)
class Settings:
    """What is fixed for the life of an optimizer; everything that may change sits in its parameter groups."""

    decomposition: Decomposition
    damping: Damping
    tail: str
    warm_start: bool
    weight_sharing: str
    rows: int | None
    loss_average: str
    sampled: bool
    start: Start
    eager_start: bool
    backward: bool
    stagger: bool
    max_failures: int
    randomness: Randomness
    sides: str = "both"  # which factors a layer keeps; the identity stands for the other
    stale: float | None = None  # change from which a layer's curvature is looked at more often; None: fixed periods
    method: Any = None  # what the block of a particular optimizer is told beyond this: a small frozen value

    def due(self, step: int, period: int, offset: int = 0) -> bool:
        """Whether a period is over; with `eager_start` also when half of the age has passed, while that is shorter.

        The periods of a layer end at `offset`, when the layers take turns; while young all are due together.
        """
        return step % period == offset or (self.eager_start and step // 2 < period and _young(step))

    def collects(self, step: int, period: int) -> bool:
        """Whether running averages are due for a statistic: when the period is over, and while young at every step.

        A statistic costs little beside a refresh, and averages that missed the growth of the gradients in the first steps
        send the model onto a plateau at a learning rate that SGD bears.
        """
        return step % period == 0 or (self.eager_start and step < YOUNG)

    def brief(self, step: int, period: int) -> bool:
        """Whether a statistic is due only because all are while young: many come one after the other, and few rows do."""
        return self.eager_start and step < YOUNG and step % period != 0

    def request(
        self, group: Group, layer: str, side: str, number: int, damping: tuple[float, bool], affordable: int | None
    ) -> Request:
        """What a decomposition is asked for under a group's present settings; `number` counts the refreshes."""
        return Request(
            strategy=self.decomposition,
            name=f"the {side} factor of {layer!r}",
            rank=group["rank"],
            oversampling=group["oversampling"],
            power_iterations=group["power_iterations"],
            tail=self.tail,
            warm_start=self.warm_start,
            damping=damping[0],
            relative=damping[1],
            affordable=affordable,
            power=self.damping.power,
            generator=self.randomness.generator("sketch", layer, side, number),
        )


def _young(step: int) -> bool:
    """Whether a step is one of 0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42...: each half as old again as the one before."""
    at = 0
    while at < step:
        at += max(1, at // 2)
    return at == step

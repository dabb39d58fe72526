"""The search for a learning rate and a weight decay: from the trials so far to the next ones, and what they came to.

First a sweep of rates, a rate beyond its edge for as long as the best lies there, then other weight decays at the best
rate, then rates between the best and its neighbours: as many trials for everybody, and nothing in it is random. Where
the trials were short, finals with the whole budget may decide: the rate that is ahead early need not end best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rkfac_lab import budgets

SWEEP = 5  # rates of the first sweep
POINT, SHARE = 0.01, 0.05  # how far a good result may lie from the best: accuracies, everything else


@dataclass(frozen=True)
class Setting:
    """What one trial tries; no `decay` means that the optimizer keeps its own."""

    lr: float
    decay: float | None = None


@dataclass(frozen=True)
class Trial:
    """One setting of one contender; `value` is the metric at the end, None if the run has none to show."""

    contender: str
    lr: float
    value: float | None
    status: str
    decay: float | None = None  # None: the optimizer's own
    steps: int = 0
    cpu_seconds: float | None = None
    message: str = ""  # why it failed
    arguments: Mapping[str, Any] = field(default_factory=dict)  # all that the contender was given


@dataclass(frozen=True)
class Space:
    """What may be tried for one contender: the first rates, and other decays in the order of their turn."""

    rates: tuple[float, ...]
    decays: tuple[float, ...] = ()
    own_decay: float | None = None


@dataclass(frozen=True)
class Region:
    """Neighbouring rates that do nearly as well as the best; `open` where an end of it was not found."""

    low: float
    high: float
    open: bool

    @property
    def decades(self) -> float:
        """Its width as a power of ten."""
        return math.log10(self.high / self.low)


@dataclass(frozen=True)
class Tuned:
    """All trials, in the order of the contenders and of their turn."""

    workload: str
    metric: str
    mode: str
    epochs: int
    validation_share: float
    trials: tuple[Trial, ...]
    own_decays: Mapping[str, float | None] = field(default_factory=dict)
    max_steps: int | None = None  # None: all of those epochs
    finals: tuple[Trial, ...] = ()  # the best settings, tried again
    final_epochs: int | None = None  # None: there are no finals

    def contenders(self) -> list[str]:
        """Names in order of first appearance."""
        return list(dict.fromkeys(trial.contender for trial in self.trials))

    def of(self, contender: str) -> list[Trial]:
        """Its trials."""
        return [trial for trial in self.trials if trial.contender == contender]

    def best(self, contender: str) -> Trial | None:
        """The winner of its finals, of its trials if it has none (the smallest rate of equals); None if all failed."""
        return winner(self.finals_of(contender) or self.of(contender), self.mode)

    def finals_of(self, contender: str) -> list[Trial]:
        """Its settings that were tried again with the whole budget."""
        return [trial for trial in self.finals if trial.contender == contender]

    def chosen(self) -> dict[str, dict[str, Any]]:
        """Arguments of each contender that has a winner; the others keep the workload's default."""
        winners = {name: self.best(name) for name in self.contenders()}
        return {name: dict(trial.arguments) for name, trial in winners.items() if trial is not None}

    def decay(self, trial: Trial) -> float | None:
        """The weight decay a trial really had; None for optimizers that know none."""
        return self.own_decays.get(trial.contender) if trial.decay is None else trial.decay

    def at_edge(self) -> list[str]:
        """Contenders whose winner has the smallest or largest rate tried: another might serve them better."""
        found = []
        for name in self.contenders():
            rates = [trial.lr for trial in self.of(name)]
            best = self.best(name)
            if best is not None and best.lr in (min(rates), max(rates)):
                found.append(name)
        return found

    def good_region(self, contender: str) -> Region | None:
        """The rates around the best of those with the optimizer's own weight decay that lie within the margin."""
        sweep = sorted((t for t in self.of(contender) if t.decay is None), key=lambda trial: trial.lr)
        best = winner(sweep, self.mode)
        if best is None or best.value is None:
            return None
        good = [t.value is not None and abs(t.value - best.value) <= self._margin(best.value) for t in sweep]
        low = high = sweep.index(best)
        while low > 0 and good[low - 1]:
            low -= 1
        while high + 1 < len(sweep) and good[high + 1]:
            high += 1
        return Region(sweep[low].lr, sweep[high].lr, open=low == 0 or high == len(sweep) - 1)

    def judged(self) -> str:
        """When a result was taken: after the budget, or within it."""
        return self._within({"epochs": self.epochs, "max_steps": self.max_steps})

    def judged_again(self) -> str:
        """When a final's result was taken; empty where there are none."""
        return self._within({"epochs": self.final_epochs}) if self.final_epochs else ""

    def margin_text(self) -> str:
        """How near a result must be to the best to be good."""
        kind = f"{100 * POINT:g} point" if self.metric.endswith("accuracy") else f"{100 * SHARE:g} %"
        return f"within {kind} of the best"

    def _within(self, limits: Mapping[str, int | None]) -> str:
        return f"{'within' if self.metric.startswith('steps_to_') else 'after'} {budgets.in_words(limits)}"

    def _margin(self, best: float) -> float:
        slack = 1e-9  # the last bits of 0.98 - 0.97 are nobody's fault
        return POINT + slack if self.metric.endswith("accuracy") else SHARE * abs(best) * (1 + slack)


def winner(trials: Sequence[Trial], mode: str) -> Trial | None:
    """The best of the trials that have a finite value; of equals the smallest rate, then the one tried first."""
    return next(iter(_ranked(trials, mode)), None)


def finalists(trials: Sequence[Trial], mode: str, count: int) -> list[Setting]:
    """The best setting at each of so many rates, best first: what is in doubt after short trials is the rate."""
    best_at: dict[float, Setting] = {}
    for trial in _ranked(trials, mode):
        best_at.setdefault(trial.lr, Setting(trial.lr, trial.decay))
    return list(best_at.values())[:count]


def _ranked(trials: Sequence[Trial], mode: str) -> list[Trial]:
    sign = -1.0 if mode == "max" else 1.0
    measured = [(sign * trial.value, trial.lr, trial) for trial in trials if trial.value is not None]
    return [trial for _, _, trial in sorted((m for m in measured if math.isfinite(m[0])), key=lambda m: m[:2])]


def rates_around(lr: float, count: int) -> tuple[float, ...]:
    """At most five rates of the grid 1, 3, 10, 30... around the one nearest to `lr`; fewer if `count` is smaller."""
    offsets = sorted(range(-(SWEEP // 2), SWEEP // 2 + 1), key=lambda offset: (abs(offset), offset))
    return tuple(sorted(_beside(lr, offset) for offset in offsets[:count]))


def next_settings(space: Space, count: int, mode: str, done: Sequence[Trial]) -> list[Setting]:
    """What to try now, all at once, after the trials of one contender that were `done` of its `count`; [] at the end."""
    left = count - len(done)
    if left <= 0:
        return []
    if not done:
        return [Setting(rate) for rate in space.rates]
    best = winner(done, mode)
    if all(trial.decay is None for trial in done):  # what is chosen with another decay is not swept again
        outside = _outside(sorted(trial.lr for trial in done), best)
        if outside is not None:
            return [Setting(outside)]
        if best is not None and space.decays:
            return [Setting(best.lr, decay) for decay in space.decays[:left]]
    assert best is not None  # without a best the sweep goes on
    return [Setting(_between(best.lr, {trial.lr for trial in done}), best.decay)]


def _outside(rates: Sequence[float], best: Trial | None) -> float | None:
    """A rate beyond the edge at which the best lies; where nothing could be measured, a smaller one may."""
    if best is None or best.lr == rates[0]:
        return _beside(rates[0], -1)
    return _beside(rates[-1], 1) if best.lr == rates[-1] else None


def _beside(lr: float, places: int) -> float:
    """The rate so many places beside `lr` on the grid 1, 3, 10, 30..."""
    exponent, odd = divmod(round(2 * math.log10(lr)) + places, 2)
    return float(f"{3 if odd else 1}e{exponent}")


def _between(lr: float, tried: set[float]) -> float:
    """A rate halfway to the farther one of the neighbours, written with as few digits as tell the three apart."""
    around = [max(rate for rate in tried if rate < lr), min(rate for rate in tried if rate > lr)]
    other = max(around, key=lambda rate: abs(math.log(rate / lr)))
    for digits in (2, 4, 6):
        middle = float(f"{math.sqrt(lr * other):.{digits}g}")
        if min(lr, other) < middle < max(lr, other):
            break
    return middle

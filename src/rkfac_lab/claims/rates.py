"""Each contender's own learning rate: a few of them tried on validation data, one seed that no reported run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rkfac_lab.claims.desk import Desk
from rkfac_lab.config import RunConfig
from rkfac_lab.record import Run

SEED = 1000
SHARE = 0.1  # of the training data


class Rates(NamedTuple):
    """What every trial came to, by contender and rate, and the best rates."""

    trials: dict[str, dict[str, float | None]]
    best: dict[str, float]


def choose(
    desk: Desk, rates: Mapping[str, Sequence[float]], config: Callable[[str, float], RunConfig], of: str = ""
) -> Rates:
    """Train every contender at each of its rates; `config` makes the trial of one, `of` tells several searches apart."""
    names = {(who, lr): f"{of} tuning {who} lr {lr:g}".strip() for who, mine in rates.items() for lr in mine}
    runs = desk.train({name: config(*key) for key, name in names.items()})
    trials = {who: {f"{lr:g}": _validated(runs.get(names[who, lr])) for lr in mine} for who, mine in rates.items()}
    return Rates(trials, {who: best(values) for who, values in trials.items()})


def best(values: Mapping[str, float | None]) -> float:
    """The rate with the best accuracy, the smallest of equals; the smallest of all where every one diverged."""
    return leading(values, 1)[0]


def leading(values: Mapping[str, float | None], count: int) -> tuple[float, ...]:
    """So many of the best rates, best first; those that diverged are none of them, unless all did."""
    known = sorted((-value, float(lr)) for lr, value in values.items() if value is not None)
    return tuple(lr for _, lr in known[:count]) or (min(map(float, values)),)


def told(trials: Mapping[str, Mapping[str, float | None]]) -> str:
    """Every trial and what it came to."""
    return "; ".join(
        f"{who} " + ", ".join(f"{lr}: {'diverged' if v is None else f'{100 * v:.1f} %'}" for lr, v in values.items())
        for who, values in trials.items()
    )


def at_edge(trials: Mapping[str, Mapping[str, float | None]], chosen: Mapping[str, float]) -> str:
    """Whose rate lies at an end of those tried, in a sentence: another might serve them better."""
    names = [who for who, values in trials.items() if chosen[who] in (min(map(float, values)), max(map(float, values)))]
    said = f"The best rate lies at an edge of those tried for {len(names)} of {len(trials)}"
    return f"{said}: {'; '.join(names)}. Others might serve them better." if names else f"{said}."


def _validated(run: Run | None) -> float | None:
    if run is None or run.summary["status"] != "finished":
        return None
    return float(run.epochs[-1]["validation_accuracy"])

"""The promise "replace one line, keep your numbers, arrive sooner", judged from runs: numbers only (`promise_text` says them).

`rs-kfac+sgd` takes sgd's place. Seed by seed, sgd's best value of the main metric is what has to be reached, and the
first evaluation at which the K-FAC is at least as good is when it was. A seed that diverged or failed before has not
reached it; a seed of which one of the two runs is missing or unfinished says nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rkfac_lab.optimizers import takes_place_of
from rkfac_lab.tables import Failure, Spread, group_by_label, main_metric, optimizer_of, spread

if TYPE_CHECKING:
    from rkfac_lab.record import Run

ENDED = ("finished", "diverged")
# What both optimizers have and a run records: what was in force, also where nobody gave it a value.
RECORDED = ("lr", "momentum", "weight_decay", "eps")
SETTINGS = ("batch_size", "epochs", "max_steps", "lr_shape", "schedule")
MEASURES = ("steps", "cpu_seconds", "seconds")


@dataclass(frozen=True)
class Cost:
    """What a run had spent at an evaluation; runs of earlier versions do not know their CPU seconds."""

    steps: float
    cpu_seconds: float | None
    seconds: float


@dataclass(frozen=True)
class Arrival:
    """One seed: the baseline's best value, what it cost there, and what the K-FAC had spent once it was as good."""

    seed: int
    best: float
    baseline: Cost
    kfac: Cost | None  # None: never


@dataclass(frozen=True)
class Promise:
    """One K-FAC in the place of one baseline; ratios are K-FAC to baseline over the seeds that arrived, None without any.

    `other` names the numbers of the baseline that the K-FAC did not keep, `added` what it was given beyond them.
    """

    label: str
    name: str  # without the plus and what follows it
    baseline: str
    metric: str
    other: tuple[str, ...]
    added: tuple[str, ...]
    arrivals: tuple[Arrival, ...]
    steps: Spread | None
    cpu_seconds: Spread | None
    seconds: Spread | None

    @property
    def reached(self) -> int:
        """How many seeds were ever as good as the baseline's best."""
        return sum(arrival.kfac is not None for arrival in self.arrivals)

    def sooner(self, measure: str) -> bool:
        """Whether every seed arrived, and on average with less of this than the baseline, as two decimals show it."""
        found: Spread | None = getattr(self, measure)
        return self.reached == len(self.arrivals) and found is not None and less(found.mean)


def less(ratio: float) -> bool:
    """Whether a ratio is below one as it is written, with two decimals."""
    return round(ratio, 2) < 1


def promises(runs: Sequence[Run], failures: Sequence[Failure] = ()) -> tuple[Promise, ...]:
    """Every K-FAC that took the place of a baseline which is here too, in order of appearance."""
    metric, mode = main_metric(runs)
    groups = group_by_label(runs)
    names = {label: optimizer_of(members[0]) for label, members in groups.items()}
    for failure in failures:  # nothing but its label is known of an optimizer of which every run failed
        names.setdefault(failure.label, failure.label)
    found = []
    for label, name in names.items():
        replaced = takes_place_of(name)
        for baseline in (other for other in groups if replaced and names[other] == replaced):
            failed = [failure.seed for failure in failures if failure.label == label]
            made = _promise(label, name, groups.get(label, []), failed, baseline, groups[baseline], metric, mode)
            found += [made] if made.arrivals else []
    return tuple(found)


def _promise(
    label: str,
    name: str,
    mine: Sequence[Run],
    failed: Sequence[int],
    baseline: str,
    its: Sequence[Run],
    metric: str,
    mode: str,
) -> Promise:
    ours, theirs = _by_seed(mine), _by_seed(its)
    pairs = [(ours[key], theirs[key]) for key in theirs if key in ours]
    lost = [theirs[seed, 0] for seed in failed if (seed, 0) in theirs and (seed, 0) not in ours]
    judged = [_arrival(its, metric, mode, mine) for mine, its in pairs] + [_arrival(its, metric, mode) for its in lost]
    arrivals = sorted((arrival for arrival in judged if arrival), key=lambda arrival: arrival.seed)
    return Promise(
        label=label,
        name=name.partition("+")[0] if label == name else label,
        baseline=baseline,
        metric=metric,
        other=_united(_other_numbers(mine, its) for mine, its in pairs),
        added=_united(_added(mine, its) for mine, its in pairs),
        arrivals=tuple(arrivals),
        **{measure: spread(_ratios(arrivals, measure)) for measure in MEASURES},
    )


def _by_seed(runs: Sequence[Run]) -> dict[tuple[int, int], Run]:
    """Runs that have ended, by seed and, where a seed was run several times, by their number."""
    found: dict[tuple[int, int], Run] = {}
    for run in runs:
        seed = int(run.summary.get("seed", run.config.get("seed", 0)))
        if run.summary.get("status") in ENDED:
            found[seed, sum(known == seed for known, _ in found)] = run
    return found


def _arrival(its: Run, metric: str, mode: str, mine: Run | None = None) -> Arrival | None:
    """One seed's result, never arrived without a run of `mine`; None where the baseline measured nothing."""
    sign = 1 if mode == "max" else -1
    measured = [line for line in its.epochs if _usable(line, metric)]
    if not measured:
        return None
    best = max(measured, key=lambda line: sign * float(line[metric]))  # of equals the first
    value = float(best[metric])
    later = [line for line in (mine.epochs if mine else ()) if _usable(line, metric)]
    hit = next((line for line in later if sign * float(line[metric]) >= sign * value), None)
    seed = int(its.summary.get("seed", its.config.get("seed", 0)))
    return Arrival(seed, value, _cost(best), _cost(hit) if hit else None)


def _usable(line: Mapping[str, Any], metric: str) -> bool:
    return line.get(metric) is not None and math.isfinite(line[metric])


def _cost(line: Mapping[str, Any]) -> Cost:
    cpu = line.get("cpu_seconds")
    return Cost(line["step"], None if cpu is None else float(cpu), float(line["train_seconds"]))


def _ratios(arrivals: Iterable[Arrival], measure: str) -> list[float]:
    pairs = [(getattr(a.kfac, measure), getattr(a.baseline, measure)) for a in arrivals if a.kfac]
    return [mine / its for mine, its in pairs if mine is not None and its]


def _other_numbers(mine: Run, its: Run) -> list[str]:
    """Names of what the two runs do not have in common, though the promise is that they do."""
    ours, theirs = _arguments(mine), _arguments(its)
    given = [key for key, value in theirs.items() if ours.get(key) != value]
    first = {line["step"]: line for line in its.epochs}
    shared = next(((line, first[line["step"]]) for line in mine.epochs if line["step"] in first), ({}, {}))
    recorded = [key for key in RECORDED if all(key in line for line in shared) and shared[0][key] != shared[1][key]]
    return [*given, *recorded, *(key for key in SETTINGS if mine.config.get(key) != its.config.get(key))]


def _added(mine: Run, its: Run) -> list[str]:
    return [key for key in _arguments(mine) if key not in (*_arguments(its), *RECORDED, "graft")]


def _arguments(run: Run) -> dict[str, Any]:
    return dict(run.config.get("optimizer", {}).get("arguments", {}))


def _united(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))

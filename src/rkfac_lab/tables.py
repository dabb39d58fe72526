"""The paper's Table 1 from run folders: pure functions from runs to numbers (`table_text` writes them down).

Every "mean +- std" is the mean and the *sample* standard deviation (division by count - 1); with one value there
is no standard deviation and only the mean is shown. Times to a target are taken over the runs that reached it,
seconds per epoch over every whole epoch of every run, "5 of 10" counts all runs, those that diverged or failed included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rkfac_lab.errors import LabError
from rkfac_lab.optimizers import is_kfac

if TYPE_CHECKING:
    from rkfac_lab.record import Run


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None with fewer than two values) of `count` values."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Target:
    """A value of a metric that runs try to reach, from below (`mode` "max") or from above ("min")."""

    metric: str
    value: float
    mode: str


@dataclass(frozen=True)
class TargetResult:
    """How one optimizer's runs did against one target; times, epochs and steps over the runs that hit."""

    target: Target
    hits: int
    runs: int
    seconds: Spread | None
    cpu_seconds: Spread | None
    steps: Spread | None
    epochs: Spread | None


@dataclass(frozen=True)
class Failure:
    """A run that ended in an error before it could leave a summary."""

    label: str
    seed: int
    message: str


@dataclass(frozen=True)
class Row:
    """One optimizer; a `baseline` is none of rkfac's."""

    label: str
    baseline: bool
    runs: int
    targets: tuple[TargetResult, ...]
    epoch_seconds: Spread | None
    best: Spread | None
    notes: str


@dataclass(frozen=True)
class Ratio:
    """One row's means divided by the reference row's; below 1 is less, None where either has none.

    `targets` are of the seconds to each target, `cpu_seconds` and `steps` likewise.
    """

    label: str
    targets: tuple[float | None, ...]
    cpu_seconds: tuple[float | None, ...]
    steps: tuple[float | None, ...]
    epoch_seconds: float | None


@dataclass(frozen=True)
class Table1:
    """One row an optimizer; `metric` and `mode` say what `best` measures."""

    workload: str
    metric: str
    mode: str
    targets: tuple[Target, ...]
    rows: tuple[Row, ...]


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and sample standard deviation of the finite values, or None if there are none."""
    kept = [float(value) for value in values if math.isfinite(value)]
    if not kept:
        return None
    return Spread(statistics.fmean(kept), statistics.stdev(kept) if len(kept) > 1 else None, len(kept))


def label_of(run: Run) -> str:
    """The name a run is shown under, also of a run that was killed before its first summary."""
    summary, config = run.summary, run.config
    return str(summary.get("label") or summary.get("optimizer") or config.get("label") or config["optimizer"]["name"])


def optimizer_of(run: Run) -> str:
    """The name of the optimizer a run is of, whatever its label."""
    return str(run.summary.get("optimizer") or run.config["optimizer"]["name"])


def kfac_run(run: Run) -> bool:
    """Whether a run is of a K-FAC, as it was written down or as its name says; nothing that it names is imported."""
    return bool(run.summary.get("kfac")) or is_kfac(optimizer_of(run))


def workload_of(run: Run) -> str:
    """The workload a run is of."""
    return str(run.summary.get("workload") or run.config["workload"])


def group_by_label(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of each label, in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(label_of(run), []).append(run)
    return groups


def targets_of(runs: Iterable[Run]) -> tuple[Target, ...]:
    """All targets the runs were given, from the easiest to the hardest."""
    found = {
        Target(str(entry["metric"]), float(entry["value"]), str(entry["mode"]))
        for run in runs
        for entry in run.summary.get("targets", [])
    }
    return tuple(sorted(found, key=lambda t: (t.metric, t.value if t.mode == "max" else -t.value)))


def main_metric(runs: Sequence[Run]) -> tuple[str, str]:
    """The metric a comparison is about and its better direction ("max", "min"): the targets', else accuracy or loss."""
    targets = targets_of(runs)
    if targets:
        return targets[-1].metric, targets[-1].mode
    measured = any(epoch.get("test_accuracy") is not None for run in runs for epoch in run.epochs)
    return ("test_accuracy", "max") if measured else ("test_loss", "min")


def metric_values(run: Run, metric: str) -> list[float]:
    """The metric at every evaluation that measured it."""
    return [float(epoch[metric]) for epoch in run.epochs if epoch.get(metric) is not None]


def best_value(run: Run, metric: str, mode: str) -> float:
    """Best finite value of a metric over a run, nan if there is none."""
    values = [value for value in metric_values(run, metric) if math.isfinite(value)]
    return (max(values) if mode == "max" else min(values)) if values else math.nan


def table1(runs: Sequence[Run], failures: Sequence[Failure] = ()) -> Table1:
    """Summarise the runs of one workload, one row a label."""
    workloads = sorted({workload_of(run) for run in runs})
    if len(workloads) > 1:
        raise LabError(f"One table compares runs of one workload, but these are of {', '.join(workloads)}; choose one.")
    metric, mode = main_metric(runs)
    targets = targets_of(runs)
    groups = group_by_label(runs)
    for failure in failures:
        groups.setdefault(failure.label, [])
    rows = []
    for label, members in groups.items():
        failed = [failure for failure in failures if failure.label == label]
        rows.append(_row(label, members, failed, targets, metric, mode))
    return Table1(workloads[0] if workloads else "", metric, mode, targets, tuple(rows))


def ratios(table: Table1, reference: str | None = None) -> tuple[Ratio, ...]:
    """Each row's mean times divided by those of the row labelled `reference` (default: `reference_label`)."""
    chosen = reference or reference_label(table)
    base = next((row for row in table.rows if row.label == chosen), None)
    if base is None:
        known = ", ".join(row.label for row in table.rows)
        raise LabError(f"There is no row '{chosen}' to compare the others with; the rows are {known}.")
    found = []
    for row in table.rows:
        pairs = list(zip(row.targets, base.targets, strict=True))
        found.append(
            Ratio(
                row.label,
                targets=tuple(_quotient(mine.seconds, its.seconds) for mine, its in pairs),
                cpu_seconds=tuple(_quotient(mine.cpu_seconds, its.cpu_seconds) for mine, its in pairs),
                steps=tuple(_quotient(mine.steps, its.steps) for mine, its in pairs),
                epoch_seconds=_quotient(row.epoch_seconds, base.epoch_seconds),
            )
        )
    return tuple(found)


def reference_label(table: Table1) -> str:
    """The row the others are measured against: the best baseline, without one exact K-FAC, else the best of all.

    Nothing can be divided by who never arrived: where some rows reached a target, the others are left aside.
    """
    arrived = [row for row in table.rows if any(result.hits for result in row.targets)]
    rows = arrived or [row for row in table.rows if row.best or row.epoch_seconds] or list(table.rows)
    baselines = [row for row in rows if row.baseline]
    exact = [row for row in rows if row.label == "k-fac"]
    return min(baselines or exact or rows, key=_standing).label if rows else ""


def _standing(row: Row) -> list[tuple[int, float]]:
    """Smaller is better: most hits of the hardest target, then least seconds to it, then the same of easier ones."""
    return [(-result.hits, result.seconds.mean if result.seconds else math.inf) for result in reversed(row.targets)]


def _row(
    label: str, runs: Sequence[Run], failed: Sequence[Failure], targets: Sequence[Target], metric: str, mode: str
) -> Row:
    count = len(runs) + len(failed)
    return Row(
        label=label,
        baseline=bool(runs) and not any(map(kfac_run, runs)),
        runs=count,
        targets=tuple(_target_result(target, runs, count) for target in targets),
        epoch_seconds=spread(_epoch_seconds(runs)),
        best=spread(best_value(run, metric, mode) for run in runs),
        notes=_notes(runs, failed),
    )


def _epoch_seconds(runs: Sequence[Run]) -> list[float]:
    """Seconds of every whole epoch; one cut short by the budget would look fast."""
    return [float(e["epoch_seconds"]) for run in runs for e in run.epochs if not e.get("partial")]


def _target_result(target: Target, runs: Sequence[Run], count: int) -> TargetResult:
    reached = [
        entry
        for run in runs
        for entry in run.summary.get("targets", [])
        if entry.get("reached")
        and (entry["metric"], float(entry["value"]), entry["mode"]) == (target.metric, target.value, target.mode)
    ]

    def over(key: str) -> Spread | None:
        return spread(float(entry[key]) for entry in reached if entry.get(key) is not None)

    return TargetResult(target, len(reached), count, over("seconds"), over("cpu_seconds"), over("step"), over("epoch"))


def _notes(runs: Sequence[Run], failed: Sequence[Failure]) -> str:
    said = []
    for status in ("diverged", "interrupted", "running"):
        count = sum(run.summary.get("status", "running") == status for run in runs)
        if count:
            said.append(f"{count} {'unfinished' if status == 'running' else status}")
    if failed:
        said.append(f"{len(failed)} failed: {failed[0].message}")
    return "; ".join(said)


def _quotient(mine: Spread | None, its: Spread | None) -> float | None:
    if mine is None or its is None or its.mean == 0:
        return None
    return mine.mean / its.mean

"""The learning rate of every contender from one grid, on equal terms: same values, same short budget, same seed.

The best is the one whose metric is best at the end of the short budget; a run that diverges or fails cannot win.
The metric is measured on a part of the training data that the trials do not train on, never on the test set, and the
seed is none of those that are reported afterwards: nothing is chosen on what it is judged by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table as RichTable
from rich.text import Text

from rkfac_lab import disk
from rkfac_lab.comparison import Comparison, slug
from rkfac_lab.errors import LabError
from rkfac_lab.harmless import visible
from rkfac_lab.jobs import Display, Job, run_all
from rkfac_lab.record import Run
from rkfac_lab.table_text import metric_name, metric_value
from rkfac_lab.tables import main_metric
from rkfac_lab.workloads import find

VALIDATION_SHARE = 0.2
SEED = 1000  # reported runs have seeds 0, 1, 2...
USUAL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# Where a sum over outputs makes the loss, and so the useful learning rates of plain gradients, of another size.
SMALLER = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
GRIDS = {"fashion-autoencoder": SMALLER, "digits-autoencoder": SMALLER}


@dataclass(frozen=True)
class Grid:
    """Learning rates to try, and for how many epochs each."""

    rates: tuple[float, ...]
    epochs: int

    def __post_init__(self) -> None:
        """Refuse rates that cannot be tried."""
        if not self.rates or any(not math.isfinite(rate) or rate <= 0 for rate in self.rates):
            raise LabError("--grid needs learning rates greater than zero, such as --grid 0.01,0.03,0.1.")
        if self.epochs < 1:
            raise LabError(f"--tune-epochs must be at least 1, not {self.epochs}.")


@dataclass(frozen=True)
class Trial:
    """One learning rate of one contender; `value` is the metric at the end, None if the run has none to show."""

    contender: str
    lr: float
    value: float | None
    status: str


@dataclass(frozen=True)
class Tuned:
    """All trials, in the order of the contenders and of the grid."""

    metric: str
    mode: str
    grid: Grid
    trials: tuple[Trial, ...]

    def best(self, contender: str) -> Trial | None:
        """The winning trial (the smallest rate of equals), None if every rate failed."""
        sign = 1.0 if self.mode == "max" else -1.0
        mine = sorted((t for t in self.trials if t.contender == contender), key=lambda trial: trial.lr)
        measured = [trial for trial in mine if trial.value is not None]
        return max(measured, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def chosen(self) -> dict[str, float]:
        """Learning rate of each contender that has a winner; the others keep the workload's default."""
        winners = {name: self.best(name) for name in self.contenders()}
        return {name: trial.lr for name, trial in winners.items() if trial is not None}

    def contenders(self) -> list[str]:
        """Names in order of first appearance."""
        return list(dict.fromkeys(trial.contender for trial in self.trials))

    def at_edge(self) -> list[str]:
        """Contenders whose winner is the smallest or largest rate tried: a wider grid might serve them better."""
        ends = (min(self.grid.rates), max(self.grid.rates))
        return [name for name, lr in self.chosen().items() if lr in ends]


def rates(text: str) -> tuple[float, ...]:
    """The learning rates in a comma-separated option; none in an empty one."""
    try:
        return tuple(sorted({float(word) for word in text.split(",") if word.strip()}))
    except ValueError:
        raise LabError(f"--grid {text!r} is not a list of numbers such as 0.01,0.03,0.1.") from None


def grid_for(comparison: Comparison, rates: Sequence[float] = (), epochs: int | None = None) -> Grid:
    """The rates given or the workload's usual ones, for the epochs given or a third of the comparison's."""
    full = comparison.config(comparison.contenders[0], SEED).epochs or find(comparison.workload).epochs
    return Grid(tuple(rates) or GRIDS.get(comparison.workload, USUAL), max(1, full // 3) if epochs is None else epochs)


def tune(comparison: Comparison, grid: Grid, folder: Path, display: Display) -> Tuned:
    """Try every rate for every contender, write `tuning.json` to `folder` and return the trials."""
    planned: list[tuple[str, float, Job]] = []
    for lr in grid.rates:
        for name in comparison.contenders:
            trial = {"epochs": grid.epochs, "label": f"{name} lr={lr:g}", "validation_share": VALIDATION_SHARE}
            config = comparison.config(name, SEED, {"lr": lr}, **trial)
            if "lr" in config.schedule:
                raise LabError(
                    f"{name} has a schedule for its learning rate, which --tune cannot choose; leave one away."
                )
            planned.append((name, lr, Job(config, folder / "tuning" / f"{slug(name)}-lr{lr:g}")))
    results = run_all([job for _, _, job in planned], display)
    if results.interrupted:
        raise KeyboardInterrupt
    metric, mode = main_metric(results.runs)
    done = {run.path.name: run for run in results.runs}
    trials = [_trial(name, lr, done.get(job.folder.name), metric) for name, lr, job in planned]
    trials.sort(key=lambda trial: comparison.contenders.index(trial.contender))
    tuned = Tuned(metric, mode, grid, tuple(trials))
    disk.write_text(folder / "tuning.json", json.dumps(to_json(tuned), indent=2) + "\n")
    return tuned


def to_json(tuned: Tuned) -> dict[str, object]:
    """Everything that was tried and chosen, as plain values."""
    return {
        "seed": SEED,
        "validation_share": VALIDATION_SHARE,
        "metric": tuned.metric,
        "mode": tuned.mode,
        "epochs": tuned.grid.epochs,
        "grid": list(tuned.grid.rates),
        "trials": [asdict(trial) for trial in tuned.trials],
        "chosen": tuned.chosen(),
        "at_edge": tuned.at_edge(),
    }


def to_rich(tuned: Tuned) -> RichTable:
    """Contenders against rates; the winner has a star."""
    title = f"{metric_name(tuned.metric)} after {tuned.grid.epochs} epochs (* chosen)"
    table = RichTable(title=Text(title), title_justify="left")
    table.add_column("optimizer", no_wrap=True)
    for rate in tuned.grid.rates:
        table.add_column(f"lr {rate:g}", justify="right")
    for name in tuned.contenders():
        cells: Mapping[float, Trial] = {trial.lr: trial for trial in tuned.trials if trial.contender == name}
        best = tuned.best(name)
        texts = [_cell(tuned.metric, cells[rate], "*" if cells[rate] == best else "") for rate in tuned.grid.rates]
        table.add_row(Text(visible(name)), *(Text(text) for text in texts))
    return table


def _trial(contender: str, lr: float, run: Run | None, metric: str) -> Trial:
    if run is None:
        return Trial(contender, lr, None, "failed")
    status = str(run.summary.get("status"))
    value = run.epochs[-1].get(metric) if run.epochs and status == "finished" else None
    return Trial(contender, lr, None if value is None else float(value), status)


def _cell(metric: str, trial: Trial, star: str) -> str:
    return trial.status if trial.value is None else metric_value(metric, trial.value) + star

"""Several optimizers on one workload: the runs, the paper's Table 1, the curves of Figure 2 and the page.

Seeds go round robin over the optimizers, so that a machine that slows down slows everybody alike. A comparison that
was cut short continues where it stopped; a run that diverges or fails is said in the table and stops nobody.
"""

from __future__ import annotations

import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from rkfac_lab import config as configuration
from rkfac_lab import disk, optimizers, plots, report, schedules, table_text, tables, train, tuning
from rkfac_lab.comparison import Comparison, slug
from rkfac_lab.data import Sources
from rkfac_lab.errors import LabError, unknown
from rkfac_lab.harmless import visible
from rkfac_lab.jobs import Display, Results, run_all
from rkfac_lab.lock import locked
from rkfac_lab.record import CONFIG
from rkfac_lab.workloads import find

RUNS = Path("runs")
WRITTEN = ("table.md", "table.csv", "table.json", "curves.png", "curves.svg", "report.html", "tuning.json")


def choose_folder(out: Path | None, workload: str, resume: bool) -> Path:
    """Where the comparison goes: `out`, or a new dated folder in runs/ (with `resume`: the latest one)."""
    find(workload)
    name = slug(workload)
    if out is None:
        earlier = sorted(RUNS.glob(f"compare-{name}-[0-9]*"))
        if resume and not earlier:
            raise LabError(f"There is no comparison of {workload} in {RUNS} to resume; name its folder with --out.")
        return earlier[-1] if resume else RUNS / f"compare-{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if not resume and any(out.glob(f"*/*/{CONFIG}")):
        raise LabError(
            f"{out} already holds a comparison; add --resume to continue it, or name another folder with --out."
        )
    return out


def run(
    comparison: Comparison,
    folder: Path,
    *,
    grid: tuning.Grid | None = None,
    reference: str | None = None,
    console: Console | None = None,
) -> Results:
    """Tune if there is a `grid`, do all runs, print the table, write everything to `folder` and say where."""
    console = console or Console()
    labels = [comparison.config(name, 0).name for name in comparison.contenders]
    if reference is not None and reference not in labels:
        raise unknown("optimizer to compare the others with", reference, labels)
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise LabError(f"Two contenders are called {twice[0]!r} and would be one row; give one another label.")
    check(comparison)
    with locked(folder):
        disk.sweep(folder, WRITTEN)
        return _run(comparison, folder, grid, reference, console)


def _run(
    comparison: Comparison, folder: Path, grid: tuning.Grid | None, reference: str | None, console: Console
) -> Results:
    warm_up(comparison)
    display = Display()
    try:
        arguments = _tuned_arguments(comparison, grid, folder, display, console) if grid else {}
        results = run_all(comparison.jobs(folder / "runs", arguments), display)
    except KeyboardInterrupt:
        results = Results(interrupted=True)
    if results.runs:
        table = tables.table1(results.runs, results.failures)
        wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, 140))
        for part in table_text.to_rich(table, reference):
            wide.print(part)
        for note in table_text.notes(table):
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        console.print("The table, the curves and the page:")
        for path in write(results, folder, reference):
            console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)
    if results.interrupted:
        console.print(f"Interrupted; the same command with --resume --out {folder} continues.", soft_wrap=True)
    return results


def _tuned_arguments(
    comparison: Comparison, grid: tuning.Grid, folder: Path, display: Display, console: Console
) -> dict[str, dict[str, Any]]:
    tuned = tuning.tune(comparison, grid, folder, display)
    console.print(tuning.to_rich(tuned))
    for name in tuned.at_edge():
        said = f"{visible(name)} did best at the edge of the grid; a wider --grid may serve it better."
        console.print(said, markup=False)
    return {label: {"lr": lr} for label, lr in tuned.chosen().items()}


def check(comparison: Comparison) -> None:
    """Build everything once, so that a wrong name or a missing file is said now and not after an hour of other runs."""
    workload = find(comparison.workload)
    data = None
    for contender in comparison.contenders:
        config = configuration.resolve(comparison.config(contender, 0))
        data = data or workload.data(Sources(config.data_dir, config.text_file))
        chosen = config.optimizer
        model = workload.model(data)
        optimizer = optimizers.build(chosen.name, model, chosen.arguments, seed=config.seed)
        schedules.check(config.schedule, optimizer, chosen, model)
        if hasattr(optimizer, "close"):
            optimizer.close()


def warm_up(comparison: Comparison) -> None:
    """Three steps of every optimizer on the small workload, so that nobody's first epoch pays for loading libraries."""
    for contender in comparison.contenders:
        name = comparison.config(contender, 0).optimizer.name
        small = configuration.from_dict({"optimizer": {"name": name}, "max_steps": 3})
        with tempfile.TemporaryDirectory() as folder:
            try:
                train.run(small, Path(folder) / "warm-up")
            except Exception:  # its own runs will say what is wrong with it
                continue


def write(results: Results, folder: Path, reference: str | None = None) -> list[Path]:
    """Write the table as Markdown, CSV and JSON, the curves and the page; returns the paths, the page last."""
    table = tables.table1(results.runs, results.failures)
    texts = {
        "table.md": table_text.to_markdown(table, reference),
        "table.csv": table_text.to_csv(table),
        "table.json": json.dumps(table_text.to_json(table, reference), indent=2) + "\n",
    }
    for name, text in texts.items():
        disk.write_text(folder / name, text)
    pictures = plots.save(plots.curves(results.runs), folder / "curves")
    page = report.write(results.runs, folder / "report.html", results.failures)
    return [*(folder / name for name in texts), *pictures, page]

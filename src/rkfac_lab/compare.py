"""Several optimizers on one workload: the runs, the paper's Table 1, the curves of Figure 2 and the page.

Seeds go round robin over the optimizers, so that a machine that slows down slows everybody alike. A comparison that
was cut short continues where it stopped; a run that diverges or fails is said in the table and stops nobody.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rkfac_lab import (
    board,
    disk,
    optimizers,
    origin,
    places,
    plans,
    plots,
    promise_text,
    provenance,
    ranks,
    report,
    schedules,
    speech,
    table_page,
    table_text,
    tables,
    train,
    tuning,
    tuning_text,
)
from rkfac_lab import config as configuration
from rkfac_lab.comparison import Comparison
from rkfac_lab.data import Sources
from rkfac_lab.errors import AbandonedError, LabError, unknown
from rkfac_lab.jobs import Display, Results, follow, run_all
from rkfac_lab.lock import locked
from rkfac_lab.plans import Plan
from rkfac_lab.promise import promises
from rkfac_lab.record import CONFIG
from rkfac_lab.workloads import find

WRITTEN = ("table.md", "table.csv", "table.json", "curves.png", "curves.svg", "report.html", tuning.FILE, origin.FILE)


def begin(given: Mapping[str, Any], out: Path | None, resume: bool) -> tuple[Plan, Path]:
    """What is compared and where: as the options `given` say, and with `resume` whatever they leave open as it was."""
    folder = choose_folder(out, given.get("workload", None if resume else Plan().workload), resume)
    before = origin.kept(folder) if resume else None
    if before and before.plan:
        return plans.continued(before.plan, given, folder), folder
    if resume and not given:
        raise LabError(
            f"{folder} does not say what was compared there; give the workload and the options of its command again."
        )
    return Plan(**given), folder


def choose_folder(out: Path | None, workload: str | None, resume: bool) -> Path:
    """Where the comparison goes: `out`, or a new dated folder in runs/ (with `resume`: the latest one)."""
    if out is None:
        return places.latest("compare") if workload is None else places.dated("compare", workload, resume)
    if workload is not None:
        find(workload)
    begun = any(out.glob(f"*/*/{CONFIG}"))
    if resume and not begun and not (out / origin.FILE).exists():
        raise LabError(f"There is nothing to continue in {out}; leave --resume away to begin a comparison there.")
    if not resume and begun:
        raise LabError(
            f"{out} already holds a comparison; add --resume to continue it, or name another folder with --out."
        )
    return out


def run(
    comparison: Comparison,
    folder: Path,
    *,
    search: tuning.Search | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    tuned: Path | None = None,
    reference: str | None = None,
    console: Console | None = None,
    continued_by: str | None = None,
) -> Results:
    """Tune if there is a `search`, do all runs, print the table, write everything to `folder` and say where.

    `arguments` were chosen before, by contender, and go over everything else; `tuned` is the file they come from.
    `continued_by` are the options with which the command goes on that was interrupted.
    """
    console = console or speech.console()
    labels = [comparison.config(name, 0).name for name in comparison.contenders]
    if reference is not None and reference not in labels:
        raise unknown("optimizer to compare the others with", reference, labels)
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise LabError(f"Two contenders are called {twice[0]!r} and would be one row; give one another label.")
    check(comparison, arguments)
    together, plan = ranks.here(), Plan.of(comparison, search, tuned, reference)
    with contextlib.ExitStack() as held:
        together.by_first(lambda: held.enter_context(locked(folder)))
        together.by_first(lambda: _require_same(plan, folder))
        together.by_first(lambda: disk.sweep(folder, WRITTEN))
        results = _run(comparison, folder, search, arguments or {}, tuned, reference, console)
    if results.interrupted:
        again = f"the same command with {continued_by}" if continued_by else f"rkfac compare --resume --out {folder}"
        console.print(f"Interrupted; {again} continues.", soft_wrap=True, markup=False)
    return results


def _require_same(plan: Plan, folder: Path) -> None:
    """Refuse to mix comparisons; where the folder does not say what it holds, by the names of its runs."""
    before = origin.kept(folder)
    if before and before.plan:
        plans.require_same(before.plan, plan, folder)
        return
    ours = {job.folder.name for job in plan.comparison().jobs(folder / origin.RUNS)}
    others = sorted({path.parent.name for path in (folder / origin.RUNS).glob(f"*/{CONFIG}")} - ours)
    if others:
        raise LabError(
            f"{folder} holds runs that this comparison has not ({', '.join(others)}); name all of its optimizers and seeds "
            "to continue it, or another folder with --out."
        )


def _run(
    comparison: Comparison,
    folder: Path,
    search: tuning.Search | None,
    arguments: Mapping[str, Mapping[str, Any]],
    tuned: Path | None,
    reference: str | None,
    console: Console,
) -> Results:
    def keep(sentences: Mapping[str, str]) -> None:
        origin.keep(origin.of_comparison(comparison, search, tuned, reference, sentences), folder)

    ranks.here().by_first(lambda: None if origin.kept(folder) else keep({}))  # what is cut short from here on can go on
    warm_up(comparison)
    display = Display()
    try:
        if not ranks.here().first:
            follow(comparison.jobs(folder / "runs", arguments))
            return Results()
        sentences = tuning_text.sentences(disk.read_json(tuned, tuning.REMEDY)) if tuned else {}
        if search is not None:
            trials = tuning.tune(comparison, search, folder, display)
            tuning_text.show(trials, console)
            arguments, sentences = trials.chosen(), tuning_text.sentences(tuning.to_json(trials))
        keep(sentences)
        results = run_all(comparison.jobs(folder / "runs", arguments), display)
    except KeyboardInterrupt:
        results = Results(interrupted=True)
    if results.runs:
        show(results, console, reference)
        console.print("The table, the curves and the page:")
        for path in write(results, folder, reference):
            console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)
    return results


def show(results: Results, console: Console, reference: str | None = None) -> None:
    """Print the tables, what there is to say about single rows, and what became of the promise."""
    table = tables.table1(results.runs, results.failures)
    pairs = promises(results.runs, results.failures)
    wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, 140))
    for part in (*table_text.to_rich(table, reference), *promise_text.to_rich(pairs)):
        wide.print(part)
    for line in (*table_text.notes(table), *map(promise_text.sentence, pairs)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def check(comparison: Comparison, arguments: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Build everything once, so that a wrong name or a missing file is said now and not after an hour of other runs."""
    configs = [comparison.config(name, 0, (arguments or {}).get(name)) for name in comparison.contenders]
    if len({config.problem for config in configs}) > 1:
        raise LabError("The contenders have models or data of their own, and cannot be compared; give all the same.")
    workload = find(configs[0].workload, configs[0].model, configs[0].data)
    data = None
    for config in map(configuration.resolve, configs):
        board.require(config)
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
            except AbandonedError:
                raise
            except Exception:  # its own runs will say what is wrong with it
                continue


def numbers(results: Results, reference: str | None = None) -> dict[str, Any]:
    """The tables as plain values."""
    table = tables.table1(results.runs, results.failures)
    pairs = promises(results.runs, results.failures)
    told = {"promises": promise_text.to_json(pairs), "made_by": provenance.to_json(results.runs)}
    return {**table_text.to_json(table, reference), **told}


def write(results: Results, folder: Path, reference: str | None = None) -> list[Path]:
    """Write the table as Markdown, CSV and JSON, the curves and the page; returns the paths, the page last."""
    kept = json.dumps(numbers(results, reference), indent=2) + "\n"
    texts = {
        "table.md": table_page.text(json.loads(kept)),
        "table.csv": table_text.to_csv(tables.table1(results.runs, results.failures)),
        "table.json": kept,
    }
    for name, text in texts.items():
        disk.write_text(folder / name, text)
    pictures = plots.save(plots.curves(results.runs), folder / "curves")
    page = report.write(results.runs, folder / "report.html", results.failures, reference)
    return [*(folder / name for name in texts), *pictures, page]

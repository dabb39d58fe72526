"""`rkfac compare`: its options; what was not given stays open, so that a comparison can be continued as it was begun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkfac_lab import ranks, speech
from rkfac_lab.errors import LabError
from rkfac_lab.options import names


def compare(
    workload: Annotated[
        str | None,
        typer.Argument(help="The problem: `rkfac --help` lists them; or module:NAME.", show_default="digits-mlp"),
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(
            help="Names, shipped configurations (paper-rs-kfac) or TOML files, comma-separated; else the workload's: the "
            "K-FACs, sgd and adamw, or on cifar10-vgg16bn the paper's four rows."
        ),
    ] = "",
    seeds: Annotated[int | None, typer.Option(help="Runs of each optimizer.", show_default="3")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of each run.")] = None,
    time_budget: Annotated[float | None, typer.Option(help="Seconds of training of each run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of all runs, or of one: rs-kfac.rank=50."),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the comparison; a dated one in runs/ if not given.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in --out, or the latest, as it was begun.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(help="Row the others are divided by; the best baseline else.")
    ] = None,
    tuned: Annotated[Path | None, typer.Option(help="A tuning.json whose choices the optimizers take.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="First choose each learning rate from one short grid.")] = False,
    grid: Annotated[str, typer.Option(help="Learning rates to try, comma-separated.")] = "",
    tune_epochs: Annotated[
        int | None, typer.Option(help="Epochs of each trial; a third of a run's if not given.")
    ] = None,
) -> None:
    """Several optimizers on one workload: table, curves and a page."""
    from rkfac_lab import compare as comparing
    from rkfac_lab import tuning

    options = {
        "workload": workload,
        "optimizers": list(names(optimizers)),
        "seeds": seeds,
        "epochs": epochs,
        "time_budget": time_budget,
        "data_dir": data_dir,
        "tune": tune or bool(grid),
        "grid": list(tuning.rates(grid)),
        "tune_epochs": tune_epochs,
        "tuned": str(tuned) if tuned else None,
        "reference": reference,
        "set": settings,
    }
    given = {key: value for key, value in options.items() if value not in (None, False, [])}
    plan, folder = ranks.here().from_first(lambda: comparing.begin(given, out, resume))
    comparison, search, reference = plan.comparison(), plan.search(), plan.reference
    tuned = Path(plan.tuned) if plan.tuned else None
    arguments = tuning.read(tuned, comparison) if tuned else None
    if search and not ranks.here().alone:
        raise LabError("--tune is for one process; tune with `rkfac tune` before, and take its choices with --tuned.")
    results = comparing.run(comparison, folder, search=search, arguments=arguments, tuned=tuned, reference=reference)
    if results.runs:
        speech.result({"folder": str(folder), **comparing.numbers(results, reference)})
    if results.interrupted:
        raise typer.Exit(130)

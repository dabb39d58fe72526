"""The `rkfac` command: argument parsing only; every command's work lives in the room of its name."""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rkfac_lab import disk, joining, ranks
from rkfac_lab.cli_bench import bench
from rkfac_lab.errors import CrashError, LabError
from rkfac_lab.harmless import visible
from rkfac_lab.options import names

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(bench, name="bench")
SHARED = ("train", "compare")  # by several processes
data = typer.Typer(no_args_is_help=True, help="Datasets: which are here, and fetch one.")
app.add_typer(data, name="data")


@app.callback()
def root(context: typer.Context) -> None:
    """Second-order training: compare optimizers, repeat the paper's experiments, measure."""
    together = ranks.here()
    if not together.alone and context.invoked_subcommand not in SHARED:
        raise LabError(
            f"rkfac {context.invoked_subcommand} is a command of one process, and torchrun has started {together.size}; "
            f"start it without torchrun (what several processes can share is rkfac {' and rkfac '.join(SHARED)})."
        )


@app.command()
def train(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A TOML file, a shipped configuration, a workload (or module:NAME), a run folder.",
        ),
    ] = "digits-mlp",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as optimizer.arguments.lr=0.1.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Instead of the workload's budget.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    time_budget: Annotated[float | None, typer.Option(help="Stop after so many seconds of training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data is; else RKFAC_DATA, then ./data.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Run folder; runs/WORKLOAD-OPTIMIZER-seedN by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was cut short.")] = False,
) -> None:
    """One run of one optimizer on one workload, resumable."""
    from rkfac_lab import config, progress
    from rkfac_lab.comparison import slug
    from rkfac_lab.train import run

    flags = {"epochs": epochs, "max_steps": max_steps, "time_budget": time_budget, "seed": seed, "data_dir": data_dir}
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    chosen = config.load(target, [*(settings or []), *given])
    if folder is None:
        name = f"{slug(chosen.workload)}-{slug(chosen.name)}-seed{chosen.seed}"
        folder = Path(target) if config.is_folder(Path(target)) else Path("runs") / name
    try:
        finished = run(chosen, folder, resume=resume, progress=progress.Bar())
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; continue with: rkfac train {folder} --resume", err=True)
        raise typer.Exit(130) from None
    typer.echo(progress.describe_run(finished))


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="fashion-mnist, cifar10 or cifar10-python.")],
    data_dir: Annotated[str | None, typer.Option(help="Where to put it; else RKFAC_DATA, then ./data.")] = None,
) -> None:
    """Download a dataset from its official place; run it again to continue a broken download."""
    from rkfac_lab.data import Sources, download, folders

    typer.echo(f"{name} is in {download.get(name, folders(Sources(data_dir))[0])}")


@data.command("list")
def data_list(
    data_dir: Annotated[str | None, typer.Option(help="Where to look; else RKFAC_DATA, then ./data.")] = None,
) -> None:
    """Which datasets are here, and how to get the others."""
    from rkfac_lab.data import Sources, catalogue

    for line in catalogue.describe(Sources(data_dir)):
        typer.echo(line)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """One self-contained HTML page from run folders: the table, interactive curves, the layers, every run."""
    from rkfac_lab import report as reporting

    console = Console()
    found = reporting.find_runs(runs)
    reporting.write(found, out)
    console.print(f"{len(found)} run{'s' * (len(found) != 1)} shown in {out}", soft_wrap=True, markup=False)
    if open_page:
        typer.launch(out.resolve().as_uri())


@app.command()
def summary(
    comparisons: Annotated[list[Path], typer.Argument(help="Folders of comparisons, with their table.json.")],
    into: Annotated[Path | None, typer.Option(help="A page with a place for it; printed if not given.")] = None,
) -> None:
    """Several comparisons in two tables: what became of the promise, and who reached the targets first."""
    from rkfac_lab import summary as summing

    text = summing.summary([summing.read(folder) for folder in comparisons])
    if into is None:
        typer.echo(text)
    else:
        summing.put_into(into, text)


@app.command()
def compare(
    workload: Annotated[
        str, typer.Argument(help="The problem (or module:NAME); `rkfac data list` names the data each one needs.")
    ] = "digits-mlp",
    optimizers: Annotated[
        str,
        typer.Option(
            help="Names, shipped configurations (paper-rs-kfac) or TOML files, comma-separated; else the workload's: the "
            "K-FACs, sgd and adamw, or on cifar10-vgg16bn the paper's four rows."
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each optimizer.")] = 3,
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue the comparison in --out, or the latest.")] = False,
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
    """Several optimizers on one workload: the paper's Table 1, curves and a page."""
    from rkfac_lab import compare as comparing
    from rkfac_lab import tuning
    from rkfac_lab.comparison import Comparison
    from rkfac_lab.workloads import find

    common = {"epochs": epochs, "time_budget": time_budget, "data_dir": data_dir}
    chosen = names(optimizers) if optimizers else find(workload).compared
    comparison = Comparison(workload, chosen, seeds, tuple(settings or ()), common)
    search = tuning.in_passing(comparison, tuning.rates(grid), tune_epochs) if tune or grid else None
    if search and tuned:
        raise LabError("--tune chooses now what --tuned has chosen before; leave one of the two away.")
    arguments = tuning.read(tuned, comparison) if tuned else None
    if search and not ranks.here().alone:
        raise LabError("--tune is for one process; tune with `rkfac tune` before, and take its choices with --tuned.")
    folder = ranks.here().from_first(lambda: comparing.choose_folder(out, workload, resume))
    results = comparing.run(comparison, folder, search=search, arguments=arguments, tuned=tuned, reference=reference)
    if results.interrupted:
        raise typer.Exit(130)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(help="Runs of each optimizer.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the demonstration, continued if it is one; else a dated one in runs/."),
    ] = None,
) -> None:
    """SGD and AdamW, and rs-kfac in the place of each with its numbers, on embedded data: does it arrive sooner?"""
    from rkfac_lab import demo as demonstration

    if demonstration.run(demonstration.choose_folder(out), seeds) is None:
        raise typer.Exit(130)


@app.command()
def tune(
    workload: Annotated[
        str, typer.Argument(help="The problem; `rkfac data list` names the data each one needs.")
    ] = "digits-mlp",
    optimizers: Annotated[
        str, typer.Option(help="Names, shipped configurations or TOML files, comma-separated.")
    ] = "sgd,adamw,muon,soap,rs-kfac",
    trials: Annotated[int | None, typer.Option(help="Of each optimizer; 8, or as many as --grid has rates.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of each trial; the workload's budget if not given.")] = None,
    grid: Annotated[
        str, typer.Option(help="First learning rates, comma-separated; five around each one's own if not given.")
    ] = "",
    validation_share: Annotated[
        float, typer.Option(help="Part of the training data that is kept apart to choose on.")
    ] = 0.1,
    by: Annotated[
        str, typer.Option(help="What decides: the metric at the 'end', or the steps to the hardest 'target'.")
    ] = "end",
    jobs: Annotated[int, typer.Option(help="Trials side by side, each in a process of its own.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Of each trial; with several --jobs 1, else the workload's.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of all trials, or of one's: rs-kfac.damping=0.1."),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the tuning, continued if it is one; else a dated one in runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest tuning if there is no --out.")] = False,
) -> None:
    """Learning rate and weight decay of several optimizers, as many trials for each, chosen on validation data."""
    from rkfac_lab import places, tuning
    from rkfac_lab import tune as tuners
    from rkfac_lab.comparison import Comparison

    common = {"epochs": epochs, "data_dir": data_dir, "threads": 1 if threads is None and jobs > 1 else threads}
    comparison = Comparison(workload, names(optimizers), 1, tuple(settings or ()), common)
    rates = tuning.rates(grid)
    count = max(tuning.TRIALS, len(rates)) if trials is None else trials
    search = tuning.Search(count, rates, validation_share=validation_share, by=by)
    folder = out or places.dated("tune", workload, resume)
    if tuners.run(comparison, search, folder, workers=jobs) is None:
        raise typer.Exit(130)


@app.command()
def spectrum(
    workload: Annotated[str, typer.Argument(help="The problem to train on, or module:NAME.")] = "digits-mlp",
    layers: Annotated[str, typer.Option(help="Layers to draw, comma-separated; a few if not given.")] = "",
    steps_max: Annotated[int, typer.Option(min=1, help="Steps of training; the paper takes 13,720.")] = 1200,
    every: Annotated[
        int | None, typer.Option(min=1, help="Steps between factor updates; the paper's 30 for long runs.")
    ] = None,
    record_every: Annotated[int, typer.Option(min=1, help="Steps between spectra at first.")] = 30,
    record_late_every: Annotated[int, typer.Option(min=1, help="Steps between spectra later.")] = 300,
    late_from: Annotated[int, typer.Option(min=0, help="The step from which it is later.")] = 300,
    seed: Annotated[int, typer.Option()] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for train.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the figures; a dated one in runs/ if not given.")] = None,
) -> None:
    """The paper's Figure 1: spectra of the Kronecker factors while K-FAC trains, and modes against width."""
    from rkfac_lab import spectrum as spectra
    from rkfac_lab.comparison import slug

    console = Console()
    period = every or spectra.statistics_period(steps_max)
    config = spectra.paper_config(workload, steps_max, period, settings or (), seed=seed, data_dir=data_dir)
    folder = out or Path("runs") / f"spectrum-{slug(workload)}-{datetime.now():%Y%m%d-%H%M%S}"
    when = spectra.Recording(record_every, record_late_every, late_from)
    recorder = spectra.run(config, folder / "run", when, names(layers) or None)
    console.print(spectra.to_rich(recorder))
    console.print("The figures and their numbers:")
    for path in spectra.write(recorder, config, folder):
        console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)


def main() -> None:
    """Entry point of the console script; a mistake the user can mend is one sentence and exit code 2.

    What nobody foresaw is one line too, with exit code 1; its traceback is kept in a file that the line names.
    """
    try:
        with joining.joined() as together:
            _command(together)
    except LabError as error:  # the processes did not find each other
        raise _ended(error) from None


def _command(together: ranks.Ranks) -> None:
    try:
        app()
    except LabError as error:
        raise _ended(error, together) from None
    except Exception as error:  # outside of any run: there is no folder for its traceback but the system's
        kept = disk.keep_traceback(Path(tempfile.mkdtemp(prefix="rkfac-")) / "traceback.txt")
        raise _ended(CrashError(error, kept), together) from None


def _ended(error: LabError, together: ranks.Ranks = ranks.ALONE) -> SystemExit:
    """Say what is wrong, in one of the processes."""
    if joining.speaks(together, error):
        typer.echo(f"rkfac: {visible(str(error))}", err=True, file=None if together.first else sys.__stderr__)
    return SystemExit(1 if isinstance(error, CrashError) else 2)


if __name__ == "__main__":
    main()

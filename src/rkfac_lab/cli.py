"""The `rkfac` command: argument parsing only; every command's work lives in the room of its name."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rkfac_lab import ending, ranks, speech, usage
from rkfac_lab.cli_bench import bench
from rkfac_lab.cli_claims import claims
from rkfac_lab.cli_compare import compare
from rkfac_lab.cli_data import data
from rkfac_lab.errors import LabError
from rkfac_lab.options import names

app = typer.Typer(
    cls=usage.Help,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
SHARED = ("train", "compare")  # by several processes


@app.callback(help=usage.ABOUT)
def root(
    context: typer.Context,
    numbers: Annotated[
        bool, typer.Option("--json", help="The result as JSON on standard output, and nothing else there.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress: only the result, and what goes wrong.")] = False,
    version: Annotated[bool, typer.Option("--version", help="The versions of rkfac, torch and python.")] = False,
) -> None:
    """What all commands have in common; these options may stand anywhere."""
    speech.choose(numbers=numbers, quiet=quiet)
    if version:
        found = usage.versions()
        speech.say(", ".join(f"{name} {number}" for name, number in found.items()))
        speech.result(found)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
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
        name = f"{slug(chosen.problem)}-{slug(chosen.name)}-seed{chosen.seed}"
        folder = Path(target) if config.is_folder(Path(target)) else Path("runs") / name
    try:
        finished = run(chosen, folder, resume=resume, progress=progress.Bar())
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; continue with: rkfac train {folder} --resume", err=True)
        raise typer.Exit(130) from None
    speech.say(progress.describe_run(finished))
    speech.result({"folder": str(folder), **finished.summary})


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """One self-contained HTML page from run folders.

    The table, interactive curves, the layers, every run.
    """
    from rkfac_lab import report as reporting

    found = reporting.find_runs(runs)
    reporting.write(found, out)
    speech.say(f"{len(found)} run{'s' * (len(found) != 1)} shown in {out}")
    speech.result({"runs": len(found), "page": str(out)})
    if open_page:
        typer.launch(out.resolve().as_uri())


@app.command()
def summary(
    comparisons: Annotated[
        list[Path], typer.Argument(metavar="FOLDERS...", help="Folders of comparisons, with their table.json.")
    ],
    into: Annotated[Path | None, typer.Option(help="A page with a place for it; printed if not given.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make each table.md again from its table.json.")] = False,
) -> None:
    """Several comparisons in two tables.

    What became of the promise, and who reached the targets first.
    """
    from rkfac_lab import summary as summing
    from rkfac_lab import table_page

    if rebuild:
        for folder in comparisons:
            speech.say(str(table_page.rebuild(folder)))
    found = [summing.read(folder) for folder in comparisons]
    text = summing.summary(found)
    if into is None:
        speech.say(text)
    else:
        summing.put_into(into, text)
    speech.result(summing.numbers(found))


app.command()(compare)
app.command()(claims)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(help="Runs of each optimizer.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the demonstration, continued if it is one; else a dated one in runs/."),
    ] = None,
) -> None:
    """Does rs-kfac arrive sooner than SGD and AdamW?

    Each of them, and rs-kfac in its place with its numbers, on embedded data.
    """
    from rkfac_lab import demo as demonstration

    folder = demonstration.choose_folder(out)
    found = demonstration.run(folder, seeds)
    if found is None:
        raise typer.Exit(130)
    speech.result({"folder": str(folder), **demonstration.numbers(found)})


@app.command()
def tune(
    workload: Annotated[
        str, typer.Argument(help="The problem: `rkfac --help` lists them; or module:NAME.")
    ] = "digits-mlp",
    optimizers: Annotated[
        str, typer.Option(help="Names, shipped configurations or TOML files, comma-separated.")
    ] = "sgd,adamw,muon,soap,rs-kfac",
    trials: Annotated[int | None, typer.Option(help="Of each optimizer; 8, or as many as --grid has rates.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of each trial; the workload's budget if not given.")] = None,
    grid: Annotated[
        str, typer.Option(help="First learning rates, comma-separated; five around each one's own if not given.")
    ] = "",
    finalists: Annotated[
        int, typer.Option(help="After short trials: so many rates of each are tried again to the end, which decides.")
    ] = 0,
    final_epochs: Annotated[int | None, typer.Option(help="Of each finalist; the workload's if not given.")] = None,
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
    """Learning rates and weight decays, as many trials for everybody.

    Chosen on validation data, never on the test set.
    """
    from rkfac_lab import places, tuning
    from rkfac_lab import tune as tuners
    from rkfac_lab.comparison import Comparison

    common = {"epochs": epochs, "data_dir": data_dir, "threads": 1 if threads is None and jobs > 1 else threads}
    comparison = Comparison(workload, names(optimizers), 1, tuple(settings or ()), common)
    rates = tuning.rates(grid)
    count = max(tuning.TRIALS, len(rates)) if trials is None else trials
    search = tuning.Search(count, rates, None, validation_share, by, finalists, final_epochs)
    folder = out or places.dated("tune", workload, resume)
    tuned = tuners.run(comparison, search, folder, workers=jobs)
    if tuned is None:
        raise typer.Exit(130)
    speech.result({"folder": str(folder), **tuning.to_json(tuned)})


@app.command()
def spectrum(
    workload: Annotated[
        str, typer.Argument(help="The problem: `rkfac --help` lists them; or module:NAME.")
    ] = "digits-mlp",
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
    """Spectra of the Kronecker factors over training, as in Figure 1.

    The paper's figure, and modes against width.
    """
    from rkfac_lab import spectrum as spectra
    from rkfac_lab.comparison import slug

    console = speech.console()
    period = every or spectra.statistics_period(steps_max)
    config = spectra.paper_config(workload, steps_max, period, settings or (), seed=seed, data_dir=data_dir)
    folder = out or Path("runs") / f"spectrum-{slug(workload)}-{datetime.now():%Y%m%d-%H%M%S}"
    when = spectra.Recording(record_every, record_late_every, late_from)
    recorder = spectra.run(config, folder / "run", when, names(layers) or None)
    console.print(spectra.to_rich(recorder))
    console.print("The figures and their numbers:")
    written = spectra.write(recorder, config, folder)
    for path in written:
        console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)
    speech.result({"folder": str(folder), "files": [str(path) for path in written]})


@app.command()
def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="A script that trains, or a function without arguments: module:function."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the script gets, behind a lone --.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Stop after so many steps of one optimizer.")] = 200,
) -> None:
    """Run a training of your own and say how its optimizer is doing.

    Prints the report of every rkfac optimizer that was built, and in words what its numbers mean.
    """
    from rkfac_lab import doctor as doctors

    with speech.not_ours():
        found = doctors.visit(target, steps, arguments or ())
    if found.patients:
        speech.say(str(found))
        speech.result(found.to_json())
    if isinstance(found.error, KeyboardInterrupt):
        raise typer.Exit(130)
    if found.error is not None:
        raise found.error


app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def main() -> None:
    """Entry point of the console script."""
    ending.run(app)


if __name__ == "__main__":
    main()

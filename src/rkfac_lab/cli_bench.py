"""`rkfac bench`: argument parsing only; each benchmark's work lives in the file of its name in `bench`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rkfac_lab import disk, speech
from rkfac_lab.options import names, sizes
from rkfac_lab.progress import Doing

bench = typer.Typer(
    no_args_is_help=True, help="Benchmarks, printed as ratios measured in one run.", rich_markup_mode=None
)

Problems = Annotated[str, typer.Option(help="mlp, vgg16bn, vgg-small, transformer; comma-separated.")]
Optimizers = Annotated[
    str,
    typer.Option(help="Parts of names (AdamW, SOAP, Shampoo, RS-KFAC, SRE, K-FAC); SGD, AdamW and RS-KFAC if empty."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")]
Out = Annotated[Path, typer.Option(help="Where the JSON goes.")]
FILE_WIDTH = 160
TARGETS = "mlp,vgg16bn,transformer"


@bench.command("statistics")
def statistics(
    layers: Annotated[
        str, typer.Option(help="3x3 convolutions as channels@side, Linear layers as linear4096.")
    ] = "64@32,128@16,256@8,512@4,linear4096",
    batch: Annotated[
        int, typer.Option(min=1, help="Samples of a convolution; Linear layers see four times as many.")
    ] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Rows drawn in the place of all.")] = 1024,
    rounds: Rounds = 5,
    out: Out = Path("runs/bench-statistics.json"),
) -> None:
    """Seconds to turn one call of a layer into updated Kronecker factors."""
    from rkfac_lab.bench import collecting

    console = _wide_console()
    with Doing("collecting") as status:
        measured = collecting.run(names(layers), batch, rows, rounds, status.update)
    _finish(console, [collecting.table(measured)], collecting.as_json(measured), out)


@bench.command("decompose")
def decompose(
    dimensions: Annotated[str, typer.Option(help="Sizes of the factor, comma-separated.")] = "513,1153,2305,4609,8193",
    rank: Annotated[int, typer.Option(min=1)] = 220,
    oversampling: Annotated[int, typer.Option(min=0)] = 10,
    rounds: Rounds = 3,
    out: Out = Path("runs/bench-decompose.json"),
) -> None:
    """Seconds and error of every way to decompose one Kronecker factor."""
    from rkfac_lab.bench import decompose as decomposing

    console = _wide_console()
    wanted = sizes("--dimensions", dimensions, "513,1153")
    with Doing("decomposing") as status:
        measured = decomposing.run(wanted, rank, oversampling, rounds, status.update)
    _finish(console, [decomposing.table(measured)], decomposing.as_json(measured), out)


@bench.command("step")
def step(
    problems: Problems = TARGETS,
    optimizers: Optimizers = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds; by problem if not given.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also seconds and share by phase.")] = False,
    out: Out = Path("runs/bench-step.json"),
) -> None:
    """Seconds a step, amortised over statistics and inverses, as ratios to torch's SGD."""
    from rkfac_lab.bench import step as stepping
    from rkfac_lab.bench.contestants import chosen
    from rkfac_lab.bench.problems import named

    console = _wide_console()
    entries = [(problem, chosen(problem, names(optimizers))) for problem in named(names(problems))]
    with Doing("stepping") as status:
        results = [r for problem, those in entries for r in stepping.run(problem, those, rounds, status.update)]
    shown = [*stepping.tables(results), *(stepping.profiles(results) if profile else ())]
    _finish(console, shown, stepping.as_json(results), out)


@bench.command("scaling")
def scaling(
    widths: Annotated[str, typer.Option(help="Widths of the layer, comma-separated.")] = "1024,2048,4096,8192",
    rank: Annotated[int, typer.Option(min=1)] = 220,
    exact_up_to: Annotated[
        int, typer.Option(min=0, help="The widest layer that the exact K-FAC is measured on.")
    ] = 4096,
    rounds: Rounds = 3,
    out: Out = Path("runs/bench-scaling.json"),
) -> None:
    """Seconds of refresh and application against the width of a layer, with the fitted exponents."""
    from rkfac_lab import plots
    from rkfac_lab.bench import scaling as growing

    console = _wide_console()
    wanted = sizes("--widths", widths, "1024,2048")
    with Doing("growing") as status:
        measured = growing.run(wanted, rank, exact_up_to, rounds, status.update)
    _finish(console, [growing.table(measured)], growing.as_json(measured, rank), out)
    figure = plots.scaling(measured, growing.exponents(measured), f"One square Linear layer at rank {rank}")
    for path in plots.save(figure, out.with_suffix("")):
        _say_written(console, path)


@bench.command("scaling-out")
def scaling_out(
    problems: Problems = "mlp",
    optimizers: Annotated[str, typer.Option(help="Parts of names; SGD is always there.")] = "RS-KFAC (default)",
    ranks: Annotated[str, typer.Option(help="Numbers of processes, comma-separated, 1 first.")] = "1,2",
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds; by problem if not given.")] = None,
    bandwidth: Annotated[float, typer.Option(min=1e-3, help="GB/s between processes on paper.")] = 10.0,
    latency: Annotated[float, typer.Option(min=0, help="Microseconds a message on paper.")] = 10.0,
    out: Out = Path("runs/bench-scaling-out.json"),
) -> None:
    """Seconds a step in several processes, by phase, with the bytes they send and a model for more of them."""
    from rkfac_lab.bench import scaling_out as sharing

    console = _wide_console()
    wanted = sizes("--ranks", ranks, "1,2")
    with Doing("sharing") as status:
        results, papers = sharing.run(
            names(problems), wanted, names(optimizers), rounds, bandwidth * 1e9, latency * 1e-6, status.update
        )
    _finish(console, sharing.tables(results, papers), sharing.as_json(results, papers), out)


@bench.command("memory")
def memory(
    problems: Problems = TARGETS,
    optimizers: Optimizers = "",
    out: Out = Path("runs/bench-memory.json"),
) -> None:
    """Bytes kept between steps, the peak beyond SGD's, and the size of a checkpoint."""
    from rkfac_lab.bench import memory as remembering

    console = _wide_console()
    with Doing("remembering") as status:
        results = remembering.run(names(problems), names(optimizers), status.update)
    _finish(console, [remembering.table(results)], remembering.as_json(results), out)


def _wide_console() -> Console:
    """A table must survive being written to a file, where no terminal says how wide it is."""
    console = speech.console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def _finish(console: Console, tables: Iterable[Table], content: dict[str, Any], path: Path) -> None:
    for table in tables:
        console.print(table)
    disk.write_text(path, json.dumps(content, indent=2) + "\n")
    _say_written(console, path)
    speech.result(content)


def _say_written(console: Console, path: Path) -> None:
    console.print(f"written to {path}", soft_wrap=True)

"""`rkfac claims`: its options; the work is done in `claims`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkfac_lab import speech
from rkfac_lab.errors import LabError


def claims(
    name: Annotated[str | None, typer.Argument(help="The claim to measure; without one, all are listed.")] = None,
    small: Annotated[
        bool, typer.Option("--small", help="On embedded data in about a minute: to try it out, no evidence.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, each in a process of its own.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Of each run.")] = 1,
    data_dir: Annotated[str | None, typer.Option(help="Folder of the data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the pages; docs/results/claims, or runs/claims with --small.")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of the runs, which are continued; runs/claims.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the pages again from their numbers.")] = False,
    into: Annotated[Path | None, typer.Option(help="With --rebuild: a page with a place for the table of all.")] = None,
) -> None:
    """The paper's claims, re-measured: one page each.

    What was measured before goes on where it stopped.
    """
    from rich.table import Table

    from rkfac_lab.claims import pages
    from rkfac_lab.claims import work as working

    runs = work or working.WORK
    folder = out or (runs if small else working.PAGES)
    if rebuild:
        if name is not None:
            raise LabError("--rebuild makes all pages again; leave the claim's name away.")
        written = working.rebuild(folder, into)
        speech.say("\n".join(map(str, written)))
        speech.result({"files": [str(path) for path in written]})
        return
    if into is not None:
        raise LabError("--into goes with --rebuild, which fills the table of all claims; add it, or leave both away.")
    if name is None:
        lines = working.listed(folder)
        shown = Table("claim", "what the paper says", "verdict", box=None)
        for line in lines:
            shown.add_row(*line)
        speech.console().print(shown)
        speech.result([{"claim": name, "says": says, "verdict": verdict} for name, says, verdict in lines])
        return
    claim = working.find(name, small)
    try:
        measured = working.measure(claim, runs, jobs, threads, data_dir, small)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command continues.", err=True)
        raise typer.Exit(130) from None
    written = pages.write(measured, folder)
    verdict = measured.verdict
    speech.say(f"{claim.title}: {verdict.word}. {verdict.why}\n" + "\n".join(map(str, written)))
    speech.result({"claim": name, "verdict": verdict._asdict(), "files": [str(path) for path in written]})

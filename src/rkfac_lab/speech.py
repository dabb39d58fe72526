"""Where the command speaks: results to standard output, progress to standard error, less with --quiet, numbers with --json."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from .harmless import visible


@dataclass(frozen=True)
class Manner:
    """How the command was asked to speak."""

    numbers: bool = False  # --json: standard output is one JSON value, and everything else goes to standard error
    quiet: bool = False  # --quiet: no progress


_manner = Manner()


def choose(*, numbers: bool, quiet: bool) -> None:
    """For the command that begins now."""
    global _manner
    _manner = Manner(numbers, quiet)


def console() -> Console:
    """For tables and sentences that are a result."""
    return Console(stderr=_manner.numbers, quiet=_manner.numbers and _manner.quiet)


def progress() -> Console:
    """For what is only of interest while it happens."""
    return Console(stderr=True, quiet=_manner.quiet)


def say(text: str) -> None:
    """A result in words, as it stands."""
    if not (_manner.numbers and _manner.quiet):
        typer.echo(text, err=_manner.numbers)


@contextlib.contextmanager
def not_ours() -> Iterator[None]:
    """For a program of the user's own, which writes to standard output as it likes where that is not a result's alone."""
    with contextlib.ExitStack() as held:
        if _manner.quiet:
            held.enter_context(contextlib.redirect_stdout(held.enter_context(open(os.devnull, "w"))))
        elif _manner.numbers:
            held.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def result(content: Any) -> None:
    """The same in numbers, if they are asked for."""
    if _manner.numbers:
        typer.echo(json.dumps(content, indent=2, default=str))


def mistake(text: str, *, heard: bool = True) -> None:
    """What went wrong; `heard`: by whoever listens to this process and not only by the terminal it was started from."""
    typer.echo(f"rkfac: {visible(text)}", err=True, file=None if heard else sys.__stderr__)

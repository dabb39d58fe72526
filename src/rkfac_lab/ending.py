"""How the command ends: its exit code, and the one line that is said where something is wrong."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import typer

from rkfac_lab import disk, joining, ranks, speech, usage
from rkfac_lab.errors import CrashError, LabError


def run(app: typer.Typer) -> None:
    """A mistake the user can mend is one sentence and exit code 2.

    What nobody foresaw is one line too, with exit code 1; its traceback is kept in a file that the line names.
    """
    try:
        with joining.joined() as together:
            _command(app, together)
    except LabError as error:  # the processes did not find each other
        raise _ended(error) from None


def _command(app: typer.Typer, together: ranks.Ranks) -> None:
    try:
        sys.exit(app(usage.hoisted(sys.argv[1:]), prog_name="rkfac", standalone_mode=False) or 0)
    except LabError as error:
        raise _ended(error, together) from None
    except usage.UsageError as error:
        if usage.is_question(error):
            typer.echo(str(error))
            raise SystemExit(2) from None
        raise _ended(LabError(usage.sentence(error)), together) from None
    except typer.Abort:  # what Ctrl-C becomes in older versions, where no command has a use for it
        raise SystemExit(130) from None
    except Exception as error:  # outside of any run: there is no folder for its traceback but the system's
        kept = disk.keep_traceback(Path(tempfile.mkdtemp(prefix="rkfac-")) / "traceback.txt")
        raise _ended(CrashError(error, kept), together) from None


def _ended(error: LabError, together: ranks.Ranks = ranks.ALONE) -> SystemExit:
    """Say what is wrong, in one of the processes."""
    if joining.speaks(together, error):
        speech.mistake(str(error), heard=together.first)
    return SystemExit(1 if isinstance(error, CrashError) else 2)

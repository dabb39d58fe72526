"""The kinds of error the laboratory shows to its user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

MANY, FEW = 60, 5  # names that are not all listed, and how many of them are


class LabError(Exception):
    """A mistake the user can mend; shown as one sentence without a traceback."""


class CrashError(LabError):
    """Something nobody foresaw, in one line; its traceback was `kept` in a file for whoever wants to look."""

    def __init__(self, error: BaseException, kept: Path | None) -> None:
        self.reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        super().__init__(f"{self.reason} (traceback: {kept or 'there was no place to keep it'})")


class AbandonedError(CrashError):
    """One process of several has failed where the others have not: the command cannot go on in any of them."""

    def __init__(self, who: str, error: BaseException, kept: Path | None = None) -> None:
        self.reason = f"{who} failed without the others, which ends the command: {one_line(error)}"
        LabError.__init__(self, f"{self.reason} (traceback: {kept})" if kept else self.reason)


def one_line(error: BaseException) -> str:
    """An error in one line without places, as a table shows it."""
    if isinstance(error, CrashError):
        return error.reason
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, LabError) else f"{type(error).__name__}: {text}"


def unknown(kind: str, name: str, valid: Iterable[str]) -> LabError:
    """The refusal of a name nobody knows: says the nearest valid one, or all of them, or a few where they are many."""
    choices = sorted(valid)
    near = difflib.get_close_matches(name, choices, n=FEW, cutoff=0.0)
    if difflib.get_close_matches(name, near, n=1, cutoff=0.5):
        hint = f"did you mean {near[0]!r}?"
    elif len(choices) > MANY:
        hint = f"the nearest of its {len(choices)} names: {', '.join(near)}."
    else:
        hint = f"choose from: {', '.join(choices) or 'none'}."
    return LabError(f"There is no {kind} {name!r}; {hint}")

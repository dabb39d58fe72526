"""The one kind of error the laboratory shows to its user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """A mistake the user can mend; shown as one sentence without a traceback."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> LabError:
    """The refusal of a name nobody knows: says the nearest valid one, or all of them."""
    choices = sorted(valid)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {', '.join(choices) or 'none'}."
    return LabError(f"There is no {kind} {name!r}; {hint}")

"""What the loss of a batch is the mean of: told by whoever knows, or the batch's own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

Terms = Callable[[Any, Any], Any]
ADVICE = "say how many with terms=lambda inputs, targets: ..."


def samples_of(inputs: Any, targets: Any) -> int:
    """How many samples a batch has: the length of its targets, or, where these are no tensor, of its inputs."""
    ours, theirs = _lengths(inputs), _lengths(targets)
    known = set(theirs & ours or theirs or ours)
    if len(known) != 1:
        found = f"tensors of lengths {sorted(known)}" if known else "no tensor"
        raise ValueError(f"it is not known how many samples the batch has, for it holds {found}: {ADVICE}")
    return known.pop()


def _lengths(given: Any) -> set[int]:
    """First dimensions of the tensors in what a model or a loss is given."""
    if isinstance(given, Tensor):
        return {len(given)} if given.ndim else set()
    parts: Iterable[Any] = given.values() if isinstance(given, Mapping) else ()
    return set().union(*map(_lengths, given if isinstance(given, tuple | list) else parts))


def counted(terms: Terms, inputs: Any, targets: Any) -> int:
    """What `terms` says of a batch."""
    said = terms(inputs, targets)
    number = said.item() if isinstance(said, Tensor) and said.numel() == 1 else said
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"terms must say an integer >= 1, how many terms the loss is the mean of, and said {said!r}")
    return number

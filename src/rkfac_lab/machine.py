"""What a run computes on: its threads for as long as it lasts, and its device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .errors import LabError
from .ranks import ALONE, Ranks


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with `count` threads inside, with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device(name: str, together: Ranks = ALONE) -> torch.device:
    """The device of this name; "auto" is the GPU where there is one. Several processes have one GPU each."""
    if not together.alone and name.startswith("cuda:"):
        raise LabError(f"The device {name!r} is one for all {together.size} processes; say cuda, and each has its own.")
    if not together.alone and torch.cuda.is_available() and name in ("auto", "cuda"):
        return torch.device("cuda", together.local)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise LabError(f"The device {name!r} cannot be used ({reason}); choose cpu, cuda or auto.") from error
    return torch.device(name)

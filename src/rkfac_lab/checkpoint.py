"""The checkpoint file: saved at once, and verified to the last byte and key before anything in it is trusted."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO, Any, TypedDict

import torch
from torch import Tensor

from . import disk
from .errors import LabError
from .structure import checked

NAME = "checkpoint.pt"
REMEDY = "delete it to begin the run again"


class BatchesState(TypedDict):
    """Where in which order of the samples the run stood."""

    permutation: Tensor
    position: int
    generator: Tensor


class State(TypedDict):
    """Everything that decides the numbers to come; what is in the first two only model and optimizer can judge."""

    model: dict[str, object]
    optimizer: dict[str, object]
    batches: BatchesState
    random: Tensor
    cuda_random: list[Tensor]
    epoch: int
    step: int
    train_seconds: float
    cpu_seconds: float
    epoch_seconds: float
    loss_sum: float
    samples: int


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at once."""
    disk.write_atomically(path, lambda file: _write(state, file))


def _write(state: dict[str, Any], file: IO[bytes]) -> None:
    """torch.save says only that something went wrong; what it was, a full disk or Ctrl-C, stands behind its error."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__context__ is not None:
            cause = cause.__context__
        raise cause from None


def load(path: Path) -> dict[str, Any] | None:
    """The last checkpoint; None if there is none yet."""
    if not os.path.lexists(path):
        return None
    try:
        with disk.trouble(path, "read"), open(path, "rb") as file:
            _verify(path, file)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except LabError:
        raise
    except Exception as error:  # torch and zipfile report damage in many ways
        raise disk.damaged(path, type(error).__name__, REMEDY) from error
    return _structured(path, state)


def _verify(path: Path, file: Any) -> None:
    """torch.save writes a zip whose checksums torch.load never looks at."""
    with zipfile.ZipFile(file) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise disk.damaged(path, f"the checksum of its part {wrong} does not fit", REMEDY)


def _structured(path: Path, state: Any) -> dict[str, Any]:
    try:
        checked(state, State)
        for name in ("epoch", "step", "train_seconds", "cpu_seconds", "epoch_seconds", "samples"):
            if state[name] < 0:
                raise LabError(f"{name} must not be negative, not {state[name]!r}.")
    except LabError as error:
        raise disk.damaged(path, str(error).rstrip("."), REMEDY) from error
    plain: dict[str, Any] = state
    return plain

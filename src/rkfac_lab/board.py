"""TensorBoard's files beside a run's own, for runs with tensorboard = true."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from . import disk
from .config import RunConfig
from .errors import LabError


def require(config: RunConfig) -> None:
    """Refuse a run that wants it where it is not installed, before anything is done for the run."""
    if config.tensorboard and not _installed():
        raise LabError(
            "tensorboard = true needs tensorboard, which is not installed: pip install 'rkfac[tensorboard]'."
        )


def _installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def opened(folder: Path, step: int) -> Any:
    """A writer that goes on after `step`."""
    from torch.utils.tensorboard import SummaryWriter

    place = folder / "tensorboard"
    with disk.trouble(place):
        return SummaryWriter(str(place), purge_step=step + 1)

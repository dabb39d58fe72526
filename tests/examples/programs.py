"""The programs in examples/: run as they stand, in this process, so that frameworks are imported once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

FOLDER = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> dict[str, Any]:
    """What a program has at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def imported(name: str) -> dict[str, Any]:
    """Its functions alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]

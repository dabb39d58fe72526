"""Shapes in the signatures of the mathematical rooms are checked while the tests run."""

from __future__ import annotations

import gc
import os

# Before torch is imported: the tests' matrices are tiny, and threads that wait for each other only slow them down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

# Before anything imports rkfac: every annotated shape below becomes a run-time check. That doubles the time of tests that take
# many small steps, so that `make test` checks shapes in the mathematical rooms and whole trajectories alone (RKFAC_SHAPES=0).
if os.environ.get("RKFAC_SHAPES") != "0":
    install_import_hook(["rkfac.linalg", "rkfac.layers"], "beartype.beartype")

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "rkfac", deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rkfac")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_collection_finish() -> None:
    """What was imported and collected is there to stay: half a million objects that no garbage collection looks at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)

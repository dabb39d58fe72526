"""One thread: the tensors here are tiny, and threads waiting for one another cost more than they give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optim.enrolled import VARIANTS
from optim.pairs import thinned

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the many members of the family, problems, grafts... all pairs, of variants one; RKFAC_WHOLE=1: all combinations."""
    if os.environ.get("RKFAC_WHOLE"):
        return
    own = [item for item in items if HERE in item.path.parents]
    _, left_out = thinned(own, VARIANTS)
    config.hook.pytest_deselected(items=left_out)
    gone = {item.nodeid for item in left_out}
    items[:] = [item for item in items if item.nodeid not in gone]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

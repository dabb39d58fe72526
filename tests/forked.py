"""Processes forked from a server that has imported the packages: a fresh interpreter takes seconds for that."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext

import pytest

# Everything that somebody needs: a worker of the tests has one server for all.
IMPORTED = ["torch", "sklearn.datasets", "rkfac", "rkfac_lab.cli", "rkfac_lab.train", "rkfac_lab.bench.scaling_out"]


def forking() -> ForkServerContext:
    """The server has no threads of its own, whose locks a fork would share."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


@contextmanager
def forked() -> Iterator[None]:
    """What would be started as a fresh interpreter meanwhile is forked."""
    context = forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        yield

"""Processes of one gloo group with a thread each that wait for orders: who waits takes no time from who is measured."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from rkfac_lab.errors import LabError

TIMEOUT = 600.0  # seconds that one waits for another
Work = Callable[..., Any]  # the place of a process among how many, what it was given -> what answers orders


class Crowd:
    """`size` processes; each builds `work(rank, size, *given)` and calls what that returns with every order."""

    def __init__(self, size: int, work: Work, *given: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a copy of this process would share the locks of its threads
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "meet")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs, work, given), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def do(self, *order: Any) -> list[Any]:
        """What every process answers, the first one first."""
        for pipe in self._pipes:
            pipe.send(order)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            codes = [process.exitcode for process in self._processes]
            raise LabError(f"One of {self.size} processes of the benchmark ended early (exit codes {codes}).") from None

    def end(self) -> None:
        """Let them go."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Connection, work: Work, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if size > 1:
        patience = timedelta(seconds=TIMEOUT)
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patience
        )
    answer = work(rank, size, *given)
    while True:
        try:
            order = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(answer(*order))

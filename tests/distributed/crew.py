"""Real processes that work together: started once for many tests, given one function after the other to run."""

from __future__ import annotations

import gc
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from forked import forking

TIMEOUT = 60  # seconds that one waits for the other in a collective
PATIENCE = 240  # seconds that a test waits for its crew


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class CrewError(AssertionError):
    """What a function raised in one of the processes, with its traceback."""


def _serve(rank: int, size: int, store: str, pipe: Connection, timeout: float) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        gc.collect()  # optimizers that are gone take their channels along
        gc.freeze()  # what a job has imported is there to stay, and need not be looked through again
        pipe.send_bytes(answer)
    torch.distributed.destroy_process_group()


class Crew:
    """`size` processes in one gloo group."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        context = forking()
        self.size = size
        store = f"tcp://127.0.0.1:{_free_port()}"
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Let everybody run a function that can be imported."""
        for pipe in self.pipes:
            pipe.send((function, args))

    def outcome(self, rank: int, seconds: float = PATIENCE) -> tuple[bool, Any]:
        """Whether it ended well in one process, and what it returned or raised."""
        if not self.pipes[rank].poll(seconds):
            raise CrewError(f"process {rank} of {self.size} said nothing for {seconds} seconds")
        good, answer = pickle.loads(self.pipes[rank].recv_bytes())
        return good, answer

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function returns in every process, in the order of their ranks."""
        self.begin(function, *args)
        found = [self.outcome(rank) for rank in range(self.size)]
        for rank, (good, answer) in enumerate(found):
            if not good:
                raise CrewError(f"in process {rank} of {self.size}:\n{answer}")
        return [answer for _, answer in found]

    def dismiss(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with suppress(OSError):
                    pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()

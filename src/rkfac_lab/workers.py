"""Runs side by side in processes of their own: what one does to memory, threads or random numbers reaches no other.

Ctrl-C is the starter's affair: workers do not hear it and are stopped by a signal of their own, once, so that each
writes down how far it came. A worker whose starter is gone stops by itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol

from rkfac_lab import train
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import one_line
from rkfac_lab.progress import ProgressReporter

BETWEEN_STEPS = 0.2  # seconds between two messages about steps
PATIENCE = 60.0  # seconds a stopped worker has to write down how far it came


class Listener(Protocol):
    """Told what becomes of the runs, by their numbers."""

    def begun(self, number: int) -> ProgressReporter: ...

    def ended(self, number: int) -> None: ...

    def failed(self, number: int, message: str) -> None: ...


def side_by_side(runs: Sequence[tuple[RunConfig, Path]], workers: int, listener: Listener) -> None:
    """Do the runs, at most `workers` at a time, begun in their order; Ctrl-C stops all of them."""
    waiting = list(enumerate(runs))
    idle: list[_Worker] = []
    busy: dict[Connection, _Task] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                number, run = waiting.pop(0)
                try:
                    reporter = listener.begun(number)
                except Exception as error:  # a damaged folder is its own run's trouble
                    listener.failed(number, one_line(error))
                    continue
                worker = idle.pop() if idle else _start()
                busy[worker.pipe] = _Task(number, worker, reporter)
                with contextlib.suppress(OSError):  # it died meanwhile, and the end of its pipe says so below
                    worker.pipe.send(run)
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                state = _heard(busy[pipe], listener)
                if state is not _State.BUSY:
                    worker = busy.pop(pipe).worker
                    idle += [worker] if state is _State.IDLE else []
    finally:
        _stop([*idle, *(task.worker for task in busy.values())])


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


@dataclass(frozen=True)
class _Task:
    number: int
    worker: _Worker
    reporter: ProgressReporter


class _State(Enum):
    BUSY, IDLE, DEAD = range(3)


def _start() -> _Worker:
    # A fresh interpreter: a copy of this one would share locks and threads that nobody runs in it.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,))
    with _deaf():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C; a process started meanwhile does so for good."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _heard(task: _Task, listener: Listener) -> _State:
    """Pass on one message of a worker and tell what it does now."""
    process = task.worker.process
    try:
        kind, values = task.worker.pipe.recv()
    except (EOFError, OSError):
        process.join()
        task.worker.pipe.close()
        listener.failed(task.number, f"its process ended without a word (exit code {process.exitcode})")
        return _State.DEAD
    if kind == "failed":
        listener.failed(task.number, *values)
    elif kind == "ended":
        try:
            listener.ended(task.number)
        except Exception as error:  # its folder cannot be read
            listener.failed(task.number, one_line(error))
    else:
        getattr(task.reporter, kind)(*values)
        return _State.BUSY
    return _State.IDLE


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()


# --- in the worker


def _work(pipe: Connection) -> None:
    """Do one run after another until the starter has no more."""
    signal.signal(signal.SIGTERM, _interrupt)
    voice = _Voice(pipe)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while True:
            config, folder = pipe.recv()
            try:
                train.run(config, folder, resume=True, progress=voice)
            except Exception as error:  # whatever an optimizer does, the others go on
                voice.say("failed", one_line(error))
            else:
                voice.say("ended")


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what is now written down must not be cut
    raise KeyboardInterrupt


class _Voice:
    """Sends what a training loop tells to the process that started it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._said = pipe, 0.0

    def say(self, kind: str, *values: Any) -> None:
        try:
            self._pipe.send((kind, values))
        except OSError:
            raise KeyboardInterrupt from None  # nobody is left who wants this run

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        self.say("begin", name, total_steps, done_steps)

    def step(self, epoch: int, step: int, loss: float) -> None:
        if time.monotonic() - self._said >= BETWEEN_STEPS:
            self._said = time.monotonic()
            self.say("step", epoch, step, loss)

    def evaluated(self, line: dict[str, Any]) -> None:
        self.say("evaluated", line)

    def end(self, status: str) -> None:
        pass  # said with "ended", when the folder is complete

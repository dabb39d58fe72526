"""What a person sees while a run goes on."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from . import speech
from .harmless import visible
from .record import Run

HEARTBEAT = 30.0  # seconds without a line after which a log's reader begins to wonder


class ProgressReporter(Protocol):
    """Told by the training loop what happens; its time counts as nobody's."""

    def begin(self, name: str, total_steps: int, done_steps: int) -> None: ...

    def step(self, epoch: int, step: int, loss: float) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def end(self, status: str) -> None: ...


class Silent:
    """Says nothing."""

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        pass

    def step(self, epoch: int, step: int, loss: float) -> None:
        pass

    def evaluated(self, line: dict[str, Any]) -> None:
        pass

    def end(self, status: str) -> None:
        pass


class Heartbeat:
    """Lines that show a log's reader that a run still goes on: one at least every `seconds`, none on a terminal."""

    def __init__(self, console: Console, seconds: float = HEARTBEAT) -> None:
        self.console, self.seconds = console, seconds
        self.restart()

    def restart(self) -> None:
        self._said = time.monotonic()

    def step(self, name: str, epoch: int, step: int, total: int, loss: float, began: float) -> None:
        taken = time.monotonic() - began
        self.now_and_then(f"{name}: epoch {epoch}, step {step} of {total}, loss {loss:.4f}, {taken:.0f} s so far")

    def now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said >= self.seconds:
            self.say(text)

    def say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(Text(visible(text)), soft_wrap=True)
            self.restart()


class Bar:
    """A progress bar with loss, the last measured accuracy and the time left; where there is no terminal, lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}  {task.fields[measured]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or speech.progress(),
        )
        self._progress.disable = not self._progress.console.is_terminal
        self._lines = Heartbeat(self._progress.console)

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        self._name, self._total = visible(name), total_steps
        self._began = time.monotonic()
        self._lines.say(f"{name}: {total_steps - done_steps} steps to do")
        self._bar = self._progress.add_task(
            escape(self._name), total=total_steps, completed=done_steps, epoch="-", loss="-", measured=""
        )
        self._progress.start()

    def step(self, epoch: int, step: int, loss: float) -> None:
        self._progress.update(self._bar, completed=step, epoch=epoch, loss=f"{loss:.4f}")
        self._lines.step(self._name, epoch, step, self._total, loss, self._began)

    def evaluated(self, line: dict[str, Any]) -> None:
        self._progress.update(self._bar, measured=describe(line))
        where = f"epoch {line['epoch']}, step {line['step']} of {self._total}"
        self._lines.say(f"{self._name}: {where}, training loss {line['train_loss']:.4f}, {describe(line)}")

    def end(self, status: str) -> None:
        self._progress.stop()


class Doing:
    """What is being done, on a terminal as it changes; where there is none, a line now and then."""

    def __init__(self, what: str, seconds: float = HEARTBEAT) -> None:
        self._console = speech.progress()
        self._status = self._console.status(what)
        self._lines = Heartbeat(self._console, seconds)

    def __enter__(self) -> Doing:
        self._status.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def update(self, what: str) -> None:
        self._status.update(what)
        self._lines.now_and_then(what)


def describe(line: dict[str, Any]) -> str:
    """The measurements of an epoch line in a few words."""
    for part in ("test", "validation"):
        if line.get(f"{part}_accuracy") is not None:
            return f"{part} accuracy {100 * line[f'{part}_accuracy']:.2f}%"
        if line.get(f"{part}_error") is not None:
            return f"{part} error {line[f'{part}_error']:.3f}"
        if line.get(f"{part}_loss") is not None:
            return f"{part} loss {line[f'{part}_loss']:.4f}"
    return "nothing measured"


def describe_run(run: Run) -> str:
    """A run in one line: how it ended, what it reached, where it is."""
    summary = run.summary
    reached = describe(summary["final"]) if summary["final"] else "nothing measured"
    return visible(
        f"{summary['label']} on {summary['workload']}: {summary['status']} after {summary['steps']} steps and "
        f"{summary['train_seconds']:.1f} s of training, {reached}; see {run.path}"
    )

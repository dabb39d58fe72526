"""What a person sees while a run goes on."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .record import Run


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


class Bar:
    """A progress bar with loss, the last measured accuracy and the time left; silent where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}  {task.fields[measured]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._progress.disable = not self._progress.console.is_terminal

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        self._bar = self._progress.add_task(
            name, total=total_steps, completed=done_steps, epoch="-", loss="-", measured=""
        )
        self._progress.start()

    def step(self, epoch: int, step: int, loss: float) -> None:
        self._progress.update(self._bar, completed=step, epoch=epoch, loss=f"{loss:.4f}")

    def evaluated(self, line: dict[str, Any]) -> None:
        self._progress.update(self._bar, measured=describe(line))

    def end(self, status: str) -> None:
        self._progress.stop()


def describe(line: dict[str, Any]) -> str:
    """The measurements of an epoch line in a few words."""
    accuracy = line.get("test_accuracy")
    if accuracy is not None:
        return f"test accuracy {100 * accuracy:.2f}%"
    if line.get("test_error") is not None:
        return f"test error {line['test_error']:.3f}"
    return f"test loss {line['test_loss']:.4f}"


def describe_run(run: Run) -> str:
    """A run in one line: how it ended, what it reached, where it is."""
    summary = run.summary
    reached = describe(summary["final"]) if summary["final"] else "nothing measured"
    return (
        f"{summary['label']} on {summary['workload']}: {summary['status']} after {summary['steps']} steps and "
        f"{summary['train_seconds']:.1f} s of training, {reached}; see {run.path}"
    )

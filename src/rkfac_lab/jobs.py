"""Many runs one after another: what is finished is not done again, what fails does not stop the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from rkfac_lab import train
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import LabError, one_line
from rkfac_lab.harmless import visible
from rkfac_lab.progress import Heartbeat, describe
from rkfac_lab.record import CONFIG, Run, load_run
from rkfac_lab.tables import Failure


@dataclass(frozen=True)
class Job:
    """One run that is wanted, and where it goes."""

    config: RunConfig
    folder: Path

    @property
    def title(self) -> str:
        """What the display calls it."""
        return visible(f"{self.config.name}, seed {self.config.seed}")


@dataclass
class Results:
    """What became of the jobs; `interrupted` says that the person at the keyboard stopped them."""

    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


def run_all(jobs: Sequence[Job], display: Display) -> Results:
    """Do the jobs in their order, continuing those that were begun and reading those that have ended.

    If not one of them could run, the mistake is the user's and is raised instead of shown as a table of failures.
    """
    results = Results()
    display.start(jobs)
    try:
        for number, job in enumerate(jobs):
            display.job(number)
            try:
                before = _state(job.folder)
                run = train.run(job.config, job.folder, resume=True, progress=display)
            except KeyboardInterrupt:
                results.interrupted = True
                if (job.folder / CONFIG).is_file():
                    results.runs.append(load_run(job.folder))
                break
            except Exception as error:  # whatever an optimizer does, the others still deserve their turn
                results.failures.append(Failure(job.config.name, job.config.seed, one_line(error)))
                display.failed(one_line(error))
                continue
            results.runs.append(run)
            display.done(run, known=before is not None and before == _state(job.folder))
    finally:
        display.stop()
    if results.failures and not results.runs and not results.interrupted:
        raise LabError(f"Not one of the {len(jobs)} runs could be done: {results.failures[0].message}")
    return results


def _state(folder: Path) -> tuple[object, object] | None:
    """How far the run in a folder has come; the same before and after means that nothing was left to do."""
    if not (folder / CONFIG).is_file():
        return None
    summary = load_run(folder).summary
    return summary.get("status"), summary.get("steps")


def seconds_left(taken: Iterable[tuple[str, float]], waiting: Iterable[str]) -> float | None:
    """Estimated seconds for the `waiting` labels from the (label, seconds) of runs so far; None without any.

    A label's own mean counts where it has one, otherwise the mean over all, so the estimate sharpens after one round.
    """
    seen: dict[str, list[float]] = {}
    for label, seconds in taken:
        seen.setdefault(label, []).append(seconds)
    if not seen:
        return None
    everything = [seconds for values in seen.values() for seconds in values]
    total = 0.0
    for label in waiting:
        values = seen.get(label, everything)
        total += sum(values) / len(values)
    return total


class Display:
    """One progress bar for all jobs (on a terminal) and one line for each that has ended (everywhere)."""

    def __init__(self, console: Console | None = None) -> None:
        """Write to `console`, standard error unless told otherwise."""
        self.console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), console=self.console
        )
        self._bars.disable = not self.console.is_terminal
        self._bar = TaskID(0)
        self._jobs: Sequence[Job] = ()
        self._number = 0
        self._began = 0.0
        self._steps = 1
        self._measured = ""
        self._taken: list[tuple[str, float]] = []
        self._heartbeat = Heartbeat(self.console)

    def start(self, jobs: Sequence[Job]) -> None:
        """Before the first job."""
        self._jobs = jobs
        self._bar = self._bars.add_task("", total=float(len(jobs)), said="")
        self._bars.start()

    def job(self, number: int) -> None:
        """Before each job."""
        self._number, self._began, self._measured = number, time.monotonic(), ""
        self._show(0.0)

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        """Told by the training loop when a run starts."""
        self._steps = max(total_steps, 1)
        self._heartbeat.restart()

    def step(self, epoch: int, step: int, loss: float) -> None:
        """Told by the training loop after each step."""
        self._show(min(step / self._steps, 1.0))
        self._heartbeat.step(f"{self._place()} {self._jobs[self._number].title}", epoch, step, self._steps, loss)

    def evaluated(self, line: dict[str, Any]) -> None:
        """Told by the training loop after each evaluation."""
        self._measured = describe(line)

    def end(self, status: str) -> None:
        """Told by the training loop when a run ends; `done` says it."""

    def done(self, run: Run, known: bool) -> None:
        """After a job that left a run; a `known` one had ended before and was only read."""
        if not known:
            self._taken.append((self._jobs[self._number].config.name, time.monotonic() - self._began))
        status = run.summary.get("status", "running")
        last = f", {describe(run.epochs[-1])}" if run.epochs else ""
        spent = f" after {float(run.summary.get('train_seconds') or 0):.2f} s of training"
        self._say(f"{status}{last}{spent}{' (from an earlier run)' if known else ''}")

    def failed(self, message: str) -> None:
        """After a job that ended in an error."""
        self._say(f"failed: {message}")

    def stop(self) -> None:
        """After the last job."""
        self._bars.stop()

    def _say(self, text: str) -> None:
        self._bars.update(self._bar, completed=self._number + 1)
        said = f"{self._place()} {self._jobs[self._number].title}: {visible(text)}"
        self.console.print(Text(said), soft_wrap=True)

    def _place(self) -> str:
        return f"[{self._number + 1}/{len(self._jobs)}]"

    def _show(self, share: float) -> None:
        if self._bars.disable:
            return
        job = self._jobs[self._number]
        waiting = [later.config.name for later in self._jobs[self._number + 1 :]]
        spent = time.monotonic() - self._began
        taken = [*self._taken, (job.config.name, spent / share)] if share > 0 else self._taken
        later = seconds_left(taken, waiting)
        left = None if later is None else later + (spent / share - spent if share > 0 else 0.0)
        said = "  ".join(filter(None, [self._measured, "" if left is None else f"{_clock(left)} left"]))
        title = f"run {self._number + 1} of {len(self._jobs)}: {job.title}"
        self._bars.update(self._bar, description=title, completed=self._number + share, said=said)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

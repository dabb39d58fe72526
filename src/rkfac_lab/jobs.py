"""Many runs, one after another or side by side: what is finished is not done again, what fails does not stop the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from rkfac_lab import ranks, speech, train
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import AbandonedError, LabError, one_line
from rkfac_lab.harmless import visible
from rkfac_lab.progress import Heartbeat, ProgressReporter, describe
from rkfac_lab.record import CONFIG, Run, load_run
from rkfac_lab.tables import Failure
from rkfac_lab.workers import Listener, side_by_side


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
    """Do the jobs in their order; if not one of them could run, the mistake is the user's and is raised."""
    results = attempt(jobs, display)
    if not results.interrupted:
        ranks.here().by_first(lambda: _require_runs(results))
    return results


def follow(jobs: Sequence[Job]) -> None:
    """What the other processes do while the first one is at `run_all`: their share of every run."""
    _one_by_one(jobs, _Deaf())
    ranks.here().by_first(lambda: None)


def _require_runs(results: Results) -> None:
    if results.failures and not results.runs:
        raise LabError(f"Not one of the {len(results.failures)} runs could be done: {results.failures[0].message}")


def attempt(
    jobs: Sequence[Job], display: Display, workers: int = 1, *, before: int = 0, total: int | None = None
) -> Results:
    """Do the jobs, continuing those that were begun and reading those that have ended; with failures as results.

    With several `workers` as many jobs run side by side, each in a process of its own. `before` and `total` are for
    the display alone, of jobs that come in several batches.
    """
    book = _Book(jobs, display)
    display.start(jobs, workers, before, total)
    try:
        if workers > 1:
            side_by_side([(job.config, job.folder) for job in jobs], workers, book)
        else:
            _one_by_one(jobs, book)
    except KeyboardInterrupt:
        book.interrupted()
    finally:
        display.stop()
    return book.results()


def _one_by_one(jobs: Sequence[Job], book: Listener) -> None:
    together = ranks.here()
    for number, job in enumerate(jobs):
        try:
            reporter = together.by_first(partial(book.begun, number))
            train.run(job.config, job.folder, resume=True, progress=reporter)
            together.by_first(partial(book.ended, number))
        except AbandonedError:
            raise
        except Exception as error:  # whatever an optimizer does, the others still deserve their turn
            book.failed(number, one_line(error))


class _Deaf:
    """Hears what the first process writes down."""

    def begun(self, number: int) -> ProgressReporter:
        raise NotImplementedError  # the first process's

    def ended(self, number: int) -> None:
        raise NotImplementedError  # the first process's

    def failed(self, number: int, message: str) -> None:
        pass


class _Book:
    """What became of each job, told by whoever does them and passed on to the display."""

    def __init__(self, jobs: Sequence[Job], display: Display) -> None:
        self._jobs, self._display = jobs, display
        self._states: dict[int, tuple[object, object] | None] = {}  # of the jobs that were begun, when they were
        self._runs: dict[int, Run] = {}
        self._failures: dict[int, Failure] = {}
        self._interrupted = False

    def begun(self, number: int) -> ProgressReporter:
        """Before a job; its progress goes to what this returns."""
        reporter = self._display.job(number)
        self._states[number] = _state(self._jobs[number].folder)
        return reporter

    def ended(self, number: int) -> None:
        """After a job that left a run."""
        folder, before = self._jobs[number].folder, self._states[number]
        run = load_run(folder)
        self._display.done(number, run, known=before is not None and before == _state(folder))
        self._runs[number] = run

    def failed(self, number: int, message: str) -> None:
        """After a job that ended in an error."""
        config = self._jobs[number].config
        self._failures[number] = Failure(config.name, config.seed, message)
        self._display.failed(number, message)

    def interrupted(self) -> None:
        """The person at the keyboard stopped them: what was under way counts as far as it came."""
        self._interrupted = True
        for number in self._states.keys() - self._runs.keys() - self._failures.keys():
            if (self._jobs[number].folder / CONFIG).is_file():
                self._runs[number] = load_run(self._jobs[number].folder)

    def results(self) -> Results:
        """Everything in the order of the jobs, whoever was done first."""
        return Results(
            [self._runs[number] for number in sorted(self._runs)],
            [self._failures[number] for number in sorted(self._failures)],
            self._interrupted,
        )


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
        self.console = console or speech.progress()
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), console=self.console
        )
        self._bars.disable = not self.console.is_terminal
        self._bar = TaskID(0)
        self._jobs: Sequence[Job] = ()
        self._workers, self._before, self._total = 1, 0, 0
        self._ended = 0
        self._running: dict[int, _UnderWay] = {}
        self._taken: list[tuple[str, float]] = []
        self._heartbeat = Heartbeat(self.console)

    def start(self, jobs: Sequence[Job], workers: int = 1, before: int = 0, total: int | None = None) -> None:
        """Before the first job; `before` others of all `total` have ended in earlier batches."""
        self._jobs, self._workers, self._before = jobs, workers, before
        self._total = total or before + len(jobs)
        self._ended, self._running = 0, {}
        self._bar = self._bars.add_task("", total=float(self._total), completed=before, said="")
        self._bars.start()

    def job(self, number: int) -> ProgressReporter:
        """Before each job; the training loop tells what this returns."""
        self._running[number] = under_way = _UnderWay(self, number)
        self.show()
        return under_way

    def done(self, number: int, run: Run, known: bool) -> None:
        """After a job that left a run; a `known` one had ended before and was only read."""
        if not known:
            began = self._running[number].began
            self._taken.append((self._jobs[number].config.name, time.monotonic() - began))
        status = run.summary.get("status", "running")
        last = f", {describe(run.epochs[-1])}" if run.epochs else ""
        spent = f" after {float(run.summary.get('train_seconds') or 0):.2f} s of training"
        self._say(number, f"{status}{last}{spent}{' (from an earlier run)' if known else ''}")

    def failed(self, number: int, message: str) -> None:
        """After a job that ended in an error."""
        self._say(number, f"failed: {message}")

    def stop(self) -> None:
        """After the last job."""
        self._bars.stop()
        self._bars.remove_task(self._bar)

    def _say(self, number: int, text: str) -> None:
        self._running.pop(number, None)
        self._ended += 1
        self._bars.update(self._bar, completed=self._before + self._ended)
        self.console.print(Text(f"{self._name(number)}: {visible(text)}"), soft_wrap=True)

    def _name(self, number: int) -> str:
        return f"[{self._before + number + 1}/{self._total}] {self._jobs[number].title}"

    def began(self) -> None:
        """A run started."""
        self._heartbeat.restart()

    def stepped(self, number: int, epoch: int, step: int, steps: int, loss: float) -> None:
        """A run took a step."""
        self.show()
        self._heartbeat.step(self._name(number), epoch, step, steps, loss, self._running[number].began)

    def show(self) -> None:
        """Draw the bar anew."""
        if self._bars.disable or not self._running:
            return
        now = time.monotonic()
        titles = [f"{self._before + n + 1}: {self._jobs[n].title}" for n in self._running]
        waiting = [later.config.name for later in self._jobs[max(self._running) + 1 :]]
        moving = {n: run for n, run in self._running.items() if run.share > 0}
        whole = [(self._jobs[n].config.name, (now - run.began) / run.share) for n, run in moving.items()]
        later = seconds_left([*self._taken, *whole], waiting)
        rest = sum((now - run.began) * (1 / run.share - 1) for run in moving.values())
        left = "" if later is None else f"{_clock((later + rest) / self._workers)} left"
        measured = [run.measured for run in self._running.values() if run.measured]
        said = "  ".join(filter(None, [*measured, left]))
        completed = self._before + self._ended + sum(run.share for run in self._running.values())
        title = f"of {self._total} runs {', '.join(titles)}"
        self._bars.update(self._bar, description=title, completed=completed, said=said)


class _UnderWay:
    """One run on the display, told by its training loop how far it is."""

    def __init__(self, display: Display, number: int) -> None:
        self._display, self._number, self._steps = display, number, 1
        self.began, self.share, self.measured = time.monotonic(), 0.0, ""

    def begin(self, name: str, total_steps: int, done_steps: int) -> None:
        self._steps = max(total_steps, 1)
        self._display.began()

    def step(self, epoch: int, step: int, loss: float) -> None:
        self.share = min(step / self._steps, 1.0)
        self._display.stepped(self._number, epoch, step, self._steps, loss)

    def evaluated(self, line: dict[str, Any]) -> None:
        self.measured = describe(line)

    def end(self, status: str) -> None:
        pass  # the display is told by whoever does the jobs


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

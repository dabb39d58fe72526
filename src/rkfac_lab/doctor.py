"""A user's own training, run for a while and looked at: what its rkfac optimizers report, and what that means in words."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

import rkfac
from rkfac.optim.base import CurvatureOptimizer

from . import imports
from .errors import LabError, one_line

STEPS = 200  # four periods of the default's refreshes: seconds can be judged from there on


class _EnoughError(BaseException):
    """Raised after the last step that is wanted; no `except Exception` of a training loop stops it."""


@dataclass
class Watch:
    """The optimizers that were built while it looked on, in their order, with the steps they have taken.

    They are kept: what a function leaves behind would be gone when it has returned.
    """

    steps: int
    built: list[CurvatureOptimizer] = field(default_factory=list)
    others: set[str] = field(default_factory=set)  # classes of other optimizers that have stepped
    taken: dict[int, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def looking_on(self) -> Iterator[None]:
        """Nothing of it is left afterwards."""
        build = CurvatureOptimizer.__init__

        def building(optimizer: CurvatureOptimizer, *arguments: Any, **keywords: Any) -> None:
            build(optimizer, *arguments, **keywords)
            self.built.append(optimizer)

        hook = register_optimizer_step_post_hook(self._stepped)
        CurvatureOptimizer.__init__ = building  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            CurvatureOptimizer.__init__ = build  # type: ignore[method-assign]
            hook.remove()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if not isinstance(optimizer, CurvatureOptimizer):
            self.others.add(type(optimizer).__name__)
            return
        taken = self.taken[id(optimizer)] = self.taken.get(id(optimizer), 0) + 1
        if taken >= self.steps:
            raise _EnoughError


@dataclass(frozen=True)
class Patient:
    """One optimizer: its class, what it reports and what that means."""

    name: str
    report: rkfac.Report
    advice: rkfac.Advice

    @classmethod
    def of(cls, optimizer: CurvatureOptimizer) -> Patient:
        return cls(type(optimizer).__name__, optimizer.report(), optimizer.advise())

    def __str__(self) -> str:
        return f"{self.name}\n\n{self.report}\n\n{self.advice}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "optimizer": self.name,
            "steps": self.report.steps,
            "seconds": self.report.seconds,
            "covered_share": self.report.covered_share,
            "settings": self.report.settings,
            "layers": [asdict(layer) for layer in self.report],
            "advice": [remark._asdict() for remark in self.advice],
        }


@dataclass(frozen=True)
class Visit:
    """What was seen, how the program ended, and what it raised, if it did."""

    patients: list[Patient]
    ending: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.patients), self.ending])

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"optimizers": [patient.to_json() for patient in self.patients], "ending": self.ending}


def visit(target: str, steps: int = STEPS, arguments: Sequence[str] = ()) -> Visit:
    """Run a script or call module:function until its first rkfac optimizer has taken `steps` steps."""
    if steps < 1:
        raise LabError(f"--steps must be at least 1, not {steps}.")
    watch = Watch(steps)
    ending, error = f"{target} came to its end.", None
    with watch.looking_on():
        try:
            _program(target, arguments)()  # importing a module may build and train already
        except _EnoughError:
            ending = f"{target} was stopped after {steps} steps (--steps)."
        except SystemExit as end:
            ending, error = _ended(target, end)
        except (Exception, KeyboardInterrupt) as raised:
            ending, error = f"{target} stopped: {one_line(raised)}", raised
    patients = [Patient.of(optimizer) for optimizer in watch.built]
    if not patients and error is None:
        seen = f" (it steps with {' and '.join(sorted(watch.others))})" if watch.others else ""
        raise LabError(
            f"{target} came to its end without building an optimizer of rkfac{seen}; build one as in the quickstart, "
            "rkfac.RSKFAC(model, lr=...)."
        )
    return Visit(patients, ending, error)


def _ended(target: str, end: SystemExit) -> tuple[str, BaseException | None]:
    """How a program's own exit is told."""
    if not end.code:
        return f"{target} came to its end.", None
    what = f"exit code {end.code}" if isinstance(end.code, int) else str(end.code)
    said = f"{target} gave up: {what}"
    return said, LabError(said)


def _program(target: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """What is run: a file as `python FILE` would, or a function without arguments of its own."""
    path = Path(target)
    if path.is_file():
        return lambda: _run_script(path, arguments)
    if ":" not in target:
        raise LabError(f"There is no script {target}; name a file of Python, or a function as module:function.")
    with _argv([target, *arguments]):
        function = imports.named("function", target, target)
    if not callable(function):
        raise LabError(
            f"{target} is of type {type(function).__name__} and cannot be called; name a function without arguments."
        )

    def call() -> None:
        with _argv([target, *arguments]):
            function()

    return call


def _run_script(path: Path, arguments: Sequence[str]) -> None:
    sys.path.insert(0, str(path.resolve().parent))  # where a script finds its neighbours
    try:
        with _argv([str(path), *arguments]):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.resolve().parent))


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before

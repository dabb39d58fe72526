"""The structure of what a run folder records: the lines of its metrics, its summary, its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

from . import disk
from .errors import LabError
from .structure import checked, is_number

REMEDY = "restore it from a copy, or delete the run folder and run again"


class EpochLine(TypedDict):
    """One evaluation; every other key is a measured number or a hyper-parameter."""

    epoch: int
    step: int
    train_seconds: float
    epoch_seconds: float


class _Named(TypedDict):
    name: str


class Layer(_Named, total=False):
    """One layer, as far as tables and pages compute with what its optimizer said."""

    rank_input: float | None
    rank_output: float | None
    captured_input: float | None
    captured_output: float | None
    damping_input: float | None
    damping_output: float | None
    clip: float | None
    seconds: dict[str, float] | None
    bytes: dict[str, float] | None


class LayersLine(TypedDict):
    """What the optimizer knew about its layers at an evaluation."""

    epoch: int
    step: int
    train_seconds: float
    layers: list[Layer]


class _Goal(TypedDict):
    metric: str
    value: float
    mode: Literal["max", "min"]
    reached: bool
    seconds: float | None
    epoch: int | None


class TargetLine(_Goal, total=False):
    """When a target was first met; runs of earlier versions do not know all of it."""

    step: int | None
    cpu_seconds: float | None


class Summary(TypedDict):
    """How a run ended."""

    workload: str
    optimizer: str
    label: str
    seed: int
    status: Literal["running", "finished", "diverged", "interrupted"]
    epochs: int
    steps: int
    train_seconds: float
    targets: list[TargetLine]
    best: dict[str, Any]
    final: dict[str, Any]


class _Dated(TypedDict):
    versions: dict[str, str]
    date: str


class Environment(_Dated, total=False):
    """Where, when and with what a run was made."""

    processor: str
    machine: str
    device: str
    cpus: int | None
    processes: int
    threads: int


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; what follows the last newline was cut by a crash and is left out."""
    try:
        content = disk.read(path)
    except FileNotFoundError:
        return []
    *complete, _ = content.split(b"\n")
    lines: list[dict[str, Any]] = []
    before = -1
    for number, text in enumerate(complete, start=1):
        line = disk.parse_json(text, path, REMEDY)
        try:
            _check_line(line)
            if line["kind"] == "epoch":
                if line["step"] <= before:
                    raise LabError(f"step {line['step']} comes after step {before}.")
                before = line["step"]
        except LabError as error:
            raise disk.damaged(path, f"line {number}: {error}".rstrip("."), REMEDY) from error
        lines.append(line)
    return lines


def ends_whole(path: Path) -> bool:
    """Whether the last line was written to its end."""
    try:
        return disk.read(path)[-1:] in (b"", b"\n")
    except FileNotFoundError:
        return True


def read_summary(path: Path) -> dict[str, Any]:
    """The summary; empty if the run ended before it was written."""
    return _read_table(path, Summary, _check_summary)


def read_environment(path: Path) -> dict[str, Any]:
    """Where and with what the run was made; empty if that is not known."""
    return _read_table(path, Environment)


def _read_table(path: Path, kind: Any, further: Any = None) -> dict[str, Any]:
    try:
        table: dict[str, Any] = disk.read_json(path, REMEDY)
    except FileNotFoundError:
        return {}
    try:
        checked(table, kind)
        if further:
            further(table)
    except LabError as error:
        raise disk.damaged(path, str(error).rstrip("."), REMEDY) from error
    return table


def _check_line(line: Any) -> None:
    kind = checked(line, dict[str, Any]).get("kind")
    if kind == "epoch":
        _check_epoch(line)
    elif kind == "layers":
        checked(line, LayersLine)
        _check_counts(line)
    else:
        raise LabError(f"kind must be 'epoch' or 'layers', not {kind!r}.")


def _check_epoch(line: dict[str, Any]) -> None:
    checked(line, EpochLine)
    _check_counts(line)
    for key, value in line.items():
        if not (key == "kind" or value is None or isinstance(value, bool) or is_number(value)):
            raise LabError(f"{key} must be a number, not {value!r}.")


def _check_counts(line: dict[str, Any]) -> None:
    for key in ("epoch", "step", "epochs", "steps", "train_seconds", "cpu_seconds", "epoch_seconds"):
        if (line.get(key) or 0) < 0:
            raise LabError(f"{key} must not be negative, not {line[key]!r}.")


def _check_summary(summary: dict[str, Any]) -> None:
    _check_counts(summary)
    for target in summary["targets"]:
        if target["reached"] and (target["seconds"] is None or target["epoch"] is None):
            raise LabError(f"the target {target['metric']} {target['value']} was reached at no time.")
    for key in ("best", "final"):
        if summary[key]:
            _check_epoch(summary[key])

"""The run folder: everything needed to read, compare, repeat or continue a run."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from .errors import LabError
from .workloads import Target

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
SUMMARY, CHECKPOINT = "summary.json", "checkpoint.pt"
PACKAGES = ("torch", "rkfac", "numpy", "scikit-learn", "pytorch-optimizer")


@dataclass(frozen=True)
class Run:
    """A run folder as read: the only form in which tables, plots and reports see a run."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    epochs: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    summary: dict[str, Any]


def load_run(path: Path | str) -> Run:
    """Read a run folder; a last line cut by a crash is left out."""
    folder = RunFolder(Path(path))
    if not folder.exists():
        raise LabError(f"{path} is not a run folder: it has no {CONFIG}; name a folder that `rkfac train` wrote.")
    lines = folder.lines()
    return Run(
        path=folder.path,
        config=folder.read(CONFIG),
        environment=folder.read(ENVIRONMENT),
        epochs=[line for line in lines if line.get("kind") == "epoch"],
        layers=[line for line in lines if line.get("kind") == "layers"],
        summary=folder.read(SUMMARY),
    )


class RunFolder:
    """Writes and reads the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / CONFIG).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """One of the JSON files; empty if the run ended before it was written."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LabError(f"{path} is damaged ({error}); delete the run folder and run again.") from error
        return content

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace one of the JSON files at once."""
        text = json.dumps(finite(content), indent=2) + "\n"
        write_atomically(self.path / name, lambda file: file.write(text.encode()))

    def lines(self) -> list[dict[str, Any]]:
        """All complete lines of the metrics."""
        path = self.path / METRICS
        if not path.is_file():
            return []
        *complete, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline was cut
        try:
            return [json.loads(line) for line in complete]
        except ValueError as error:
            raise LabError(f"{path} is damaged ({error}); delete the run folder and run again.") from error

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add lines to the metrics, on disk before this returns."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(line)) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps a resumed run will do again."""
        kept = [line for line in self.lines() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path / METRICS, lambda file: file.write(text.encode()))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint at once."""
        write_atomically(self.path / CHECKPOINT, lambda file: torch.save(state, file))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint; None if there is none yet."""
        path = self.path / CHECKPOINT
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch reports damage in many ways
            raise LabError(f"{path} is damaged ({type(error).__name__}); delete it to begin the run again.") from error
        return state


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write beside the file, flush to disk, then rename: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as null, which is all JSON knows of them."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine, threads and date of the run."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def summarise(run_facts: dict[str, Any], epochs: list[dict[str, Any]], targets: Iterable[Target]) -> dict[str, Any]:
    """The summary: facts of the run, when each target was first met, the best and the last epoch."""
    goals = list(targets)
    reached = []
    for goal in goals:
        hit = next((line for line in epochs if goal.reached(line.get(goal.metric))), None)
        reached.append(
            {
                "metric": goal.metric,
                "value": goal.value,
                "mode": goal.mode,
                "reached": hit is not None,
                "seconds": hit["train_seconds"] if hit else None,
                "epoch": hit["epoch"] if hit else None,
            }
        )
    return {**run_facts, "targets": reached, "best": _best(epochs, goals), "final": epochs[-1] if epochs else {}}


def _best(epochs: list[dict[str, Any]], goals: list[Target]) -> dict[str, Any]:
    """The epoch line with the best value of the first target's metric (the test loss if there is no target)."""
    metric, mode = (goals[0].metric, goals[0].mode) if goals else ("test_loss", "min")
    measured = [line for line in epochs if line.get(metric) is not None]
    if not measured:
        return {}
    choose = max if mode == "max" else min
    return choose(measured, key=lambda line: float(line[metric]))

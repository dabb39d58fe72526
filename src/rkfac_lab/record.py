"""The run folder: everything needed to read, compare, repeat or continue a run."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, config, disk, metrics
from .errors import LabError
from .workloads import Target

CONFIG, ENVIRONMENT, METRICS = config.FILE, "environment.json", "metrics.jsonl"
SUMMARY, CHECKPOINT, TRACEBACK = "summary.json", checkpoint.NAME, "traceback.txt"
FILES = (CONFIG, ENVIRONMENT, METRICS, SUMMARY, CHECKPOINT, TRACEBACK)
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
    """Read a run folder; a last line cut by a crash is left out, anything else that is not as it should be is refused."""
    folder = RunFolder(Path(path))
    if not folder.exists():
        raise LabError(f"{path} is not a run folder: it has no {CONFIG}; name a folder that `rkfac train` wrote.")
    lines = folder.lines()
    run = Run(
        path=folder.path,
        config=config.read_folder(folder.path),
        environment=folder.environment(),
        epochs=[line for line in lines if line["kind"] == "epoch"],
        layers=[line for line in lines if line["kind"] == "layers"],
        summary=folder.summary(),
    )
    _require_whole(run)
    return run


def _require_whole(run: Run) -> None:
    """A run that has ended wrote its last line before its summary: without that line the metrics were cut."""
    if run.summary.get("status", "running") == "running":
        return
    path, final = run.path / METRICS, run.summary["final"]
    if final and final["step"] not in [line["step"] for line in run.epochs]:
        why = f"it has no line of step {final['step']}, which {SUMMARY} names as the last"
        raise disk.damaged(path, why, metrics.REMEDY)
    if not metrics.ends_whole(path):
        raise disk.damaged(path, "its last line is cut, though the run had ended", metrics.REMEDY)


class RunFolder:
    """Writes and reads the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether a run has begun here."""
        return config.is_folder(self.path)

    def summary(self) -> dict[str, Any]:
        """How the run ended; empty if it was killed before it could say."""
        return metrics.read_summary(self.path / SUMMARY)

    def environment(self) -> dict[str, Any]:
        """Where and with what it was made; empty if it was killed before it could say."""
        return metrics.read_environment(self.path / ENVIRONMENT)

    def lines(self) -> list[dict[str, Any]]:
        """All complete lines of the metrics."""
        return metrics.read_lines(self.path / METRICS)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace one of the JSON files at once."""
        text = json.dumps(finite(content), indent=2) + "\n"
        disk.write_atomically(self.path / name, lambda file: file.write(text.encode()))

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add lines to the metrics, on disk before this returns."""
        disk.append(self.path / METRICS, "".join(json.dumps(finite(line)) + "\n" for line in lines))

    def keep(self, steps: Collection[int]) -> None:
        """Drop the metrics of all other steps, which a resumed run will measure again or not at all."""
        text = "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] in steps)
        disk.write_atomically(self.path / METRICS, lambda file: file.write(text.encode()))

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint at once."""
        checkpoint.save(self.path / CHECKPOINT, state)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, verified; None if there is none yet."""
        return checkpoint.load(self.path / CHECKPOINT)

    def sweep(self) -> None:
        """Delete what killed processes left half written; only while the folder is locked."""
        disk.sweep(self.path, FILES)

    def keep_traceback(self) -> Path | None:
        """Write down the traceback of the exception that is being handled; returns where, None if the disk refused."""
        return disk.keep_traceback(self.path / TRACEBACK)

    def forget_traceback(self) -> None:
        """The run ended well after all."""
        with disk.trouble(self.path / TRACEBACK, "deleted"):
            (self.path / TRACEBACK).unlink(missing_ok=True)


class Elsewhere(RunFolder):
    """The folder of a run whose first process writes it, for the others: nothing they do changes anything there."""

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Nothing."""

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Nothing."""

    def keep(self, steps: Collection[int]) -> None:
        """Nothing."""

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def sweep(self) -> None:
        """Nothing."""

    def keep_traceback(self) -> Path | None:
        """In a folder of the system's."""
        return disk.keep_traceback(Path(tempfile.mkdtemp(prefix="rkfac-")) / TRACEBACK)

    def forget_traceback(self) -> None:
        """Nothing."""


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as null, which is all JSON knows of them."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """Versions, machine, processes, threads of each and date of the run."""
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
        "processes": processes,
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
                "cpu_seconds": hit.get("cpu_seconds") if hit else None,
                "step": hit["step"] if hit else None,
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

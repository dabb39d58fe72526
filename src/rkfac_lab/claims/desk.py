"""Where a claim is measured: its folder, its runs, and parts that are done once and read again afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rkfac_lab import config as configuration
from rkfac_lab import disk, identity
from rkfac_lab.comparison import slug
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Display, Job, attempt
from rkfac_lab.record import Run, RunFolder

Part = TypeVar("Part")
REMEDY = "delete it to measure that part again"


@dataclass(frozen=True)
class Desk:
    """`workers`: as many runs side by side, each with `threads` threads."""

    folder: Path
    workers: int = 1
    threads: int = 1
    data_dir: str | None = None
    display: Display = field(default_factory=Display)

    def part(self, name: str, make: Callable[[], Part]) -> Part:
        """What `make` returns, plain values; kept on disk, so that a measurement which was stopped goes on behind it."""
        path = self.folder / "parts" / f"{slug(name)}.json"
        try:
            kept: Part = disk.read_json(path, REMEDY)
            return kept
        except FileNotFoundError:
            pass
        self.say(name)
        made = make()
        disk.make_folder(path.parent)
        disk.write_text(path, json.dumps(made) + "\n")
        again: Part = json.loads(json.dumps(made))  # as whoever comes later will read it
        return again

    def say(self, text: str) -> None:
        """What is being done now."""
        self.display.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def train(self, wanted: Mapping[str, RunConfig]) -> dict[str, Run]:
        """The runs by their names; what was begun goes on, what has ended is read. A run that failed is nobody's row."""
        jobs = [
            Job(configuration.resolve(self._placed(name, config)), self.folder / "runs" / slug(name))
            for name, config in wanted.items()
        ]
        if len({job.folder for job in jobs}) < len(jobs):
            raise LabError("Two runs of a claim would share a folder; give them other names.")
        for job in jobs:
            folder = RunFolder(job.folder)
            if folder.exists():
                identity.require_same_run(folder, identity.recorded(folder), job.config, resume=True)
        results = attempt(jobs, self.display, self.workers)
        if results.interrupted:
            raise KeyboardInterrupt
        runs = {run.path: run for run in results.runs}
        return {name: runs[job.folder] for name, job in zip(wanted, jobs, strict=True) if job.folder in runs}

    def _placed(self, name: str, config: RunConfig) -> RunConfig:
        values: dict[str, Any] = {**config.to_dict(), "label": config.label or name, "threads": self.threads}
        return configuration.from_dict({**values, "data_dir": self.data_dir})

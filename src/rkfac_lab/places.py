"""Where the results of a command go that was not told."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rkfac_lab.comparison import slug
from rkfac_lab.errors import LabError
from rkfac_lab.workloads import find

RUNS = Path("runs")


def latest(command: str) -> Path:
    """The latest dated folder of this command in runs/, whatever its workload."""
    earlier = sorted(RUNS.glob(f"{command}-*-[0-9]*-[0-9]*"), key=lambda folder: folder.name.split("-")[-2:])
    if not earlier:
        raise LabError(f"There is no `rkfac {command}` in {RUNS} to resume; name its folder with --out.")
    return earlier[-1]


def dated(command: str, workload: str, resume: bool) -> Path:
    """A new dated folder of this command in runs/; with `resume` the latest one."""
    find(workload)
    name = f"{command}-{slug(workload)}"
    if not resume:
        return RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    earlier = sorted(RUNS.glob(f"{name}-[0-9]*"))
    if not earlier:
        raise LabError(f"There is no `rkfac {command}` of {workload} in {RUNS} to resume; name its folder with --out.")
    return earlier[-1]

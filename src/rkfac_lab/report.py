"""One self-contained HTML page from runs: the tables, interactive curves, the layers, every run's details.

The page works from disk without network. Its parts lie in `assets/` (`page_data` has what it shows); `write` puts them
together. Text from runs is embedded as JSON and inserted by the page as text only, and the page's content security
policy names the hashes of its own script and style, so that nothing else on it can run or load. The charts are uPlot's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rkfac_lab import disk, record, tables
from rkfac_lab.errors import LabError
from rkfac_lab.page_data import contents
from rkfac_lab.record import Run

STYLES = ("vendor/uPlot.min.css", "page.css")
LICENCE = "vendor/uPlot.LICENSE"
OWN = ("dom.js", "scales.js", "chart.js", "download.js", "page.js", "tables.js", "curves.js", "layers.js")
SCRIPTS = ("vendor/uPlot.iife.min.js", *OWN)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Load the runs at `paths`: run folders, folders of them, or what `rkfac compare` wrote; each folder's by age."""
    runs: dict[Path, Run] = {}
    for path in paths:
        folders = _run_folders(path)
        if not folders:
            problem = "holds no run: no config.json in it or one level below" if path.is_dir() else "is not a folder"
            raise LabError(f"'{path}' {problem}; give a folder that `rkfac train` or `rkfac compare` wrote.")
        loaded = [_with_summary(record.load_run(folder)) for folder in folders]
        for run in sorted(loaded, key=lambda run: str(run.environment.get("date", ""))):
            runs.setdefault(run.path.resolve(), run)
    return list(runs.values())


def write(
    runs: Sequence[Run], path: Path, failures: Sequence[tables.Failure] = (), reference: str | None = None
) -> Path:
    """Write the page on `runs` to `path` and return the path.

    `failures` are runs that left no folder to read, `reference` is the row that the others are divided by.
    """
    if not runs:
        raise LabError(f"There is no run to show, so '{path}' was not written; give at least one run folder.")
    text = page(runs, failures, reference)
    disk.write_text(path, text)
    return path


def page(runs: Sequence[Run], failures: Sequence[tables.Failure] = (), reference: str | None = None) -> str:
    """The page's whole text."""
    style = "\n".join(map(_asset, STYLES))
    # Who copies uPlot copies its licence: the page carries both.
    script = "\n".join([f"/*\n{_asset(LICENCE)}\n*/", *map(_asset, SCRIPTS)])
    data = contents(runs, failures, reference)
    return Template(_asset("page.html")).substitute(
        title=html.escape(", ".join(dict.fromkeys(group["workload"] for group in data["groups"]))),
        style=style,
        style_hash=_policy_hash(style),
        script=script,
        script_hash=_policy_hash(script),
        data=embedded_json(data),
    )


def _asset(name: str) -> str:
    return (resources.files("rkfac_lab") / "assets" / name).read_text(encoding="utf-8")


def embedded_json(value: Any) -> str:
    """JSON that no HTML parser takes for markup: every "<" is escaped, so neither "</script>" nor "<!--" can occur."""
    text = json.dumps(record.finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _policy_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _run_folders(path: Path) -> list[Path]:
    """`path` itself, or the run folders in it, or those in its "runs" (the trials of a tuning lie beside it)."""
    places = [place for place in (path, path / "runs") if place.is_dir()]
    found = [[place] if _is_run(place) else sorted(filter(_is_run, place.iterdir())) for place in places]
    return next(filter(None, found), [])


def _is_run(path: Path) -> bool:
    return record.RunFolder(path).exists()


def _with_summary(run: Run) -> Run:
    """A run that was killed before it could leave a summary gets what its configuration says of it."""
    config = run.config
    if "workload" not in config or "name" not in config.get("optimizer", {}):
        problem = f"{record.CONFIG} names no workload and optimizer"
        raise LabError(f"'{run.path}' is not a run folder: its {problem}; give one that `rkfac train` wrote.")
    known = {
        "workload": config["workload"],
        "optimizer": config["optimizer"]["name"],
        "label": config.get("label"),
        "seed": config.get("seed"),
        "status": "running",
        "targets": [],
    }
    return replace(run, summary={**known, **run.summary})

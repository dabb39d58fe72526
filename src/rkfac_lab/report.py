"""One self-contained HTML page from runs: the table, interactive curves, the layers, every run's details.

The page works from disk without network. Its parts lie in `assets/`; `write` puts them and the runs' data together.
Text from runs is embedded as JSON and inserted by the page as text only, and the page's content security policy
names the hashes of its own script and style, so that nothing else on it can run or load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

from rkfac_lab import disk, plots, promise_text, record, table_text, tables
from rkfac_lab.errors import LabError
from rkfac_lab.metrics import ends_whole
from rkfac_lab.promise import promises
from rkfac_lab.record import Run

SCRIPTS = ("dom.js", "chart.js", "cursor.js", "page.js", "layers.js")
FIRST_METRICS = ("test_accuracy", "test_error", "test_loss", "train_loss")
DASHES = 4  # .d0 to .d3 in page.css
VERSIONS = ("rkfac", "torch", "numpy", "python")
LAYER_FACTS = ("name", "kind", "covered", "reason", "parameters", "input_dim", "output_dim", "bytes", "failures")
LAYER_SERIES = (
    "rank_input",
    "rank_output",
    "captured_input",
    "captured_output",
    "damping_input",
    "damping_output",
    "clip",
)


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


def write(runs: Sequence[Run], path: Path, failures: Sequence[tables.Failure] = ()) -> Path:
    """Write the page on `runs` to `path` and return the path; `failures` are runs that left no folder to read."""
    if not runs:
        raise LabError(f"There is no run to show, so '{path}' was not written; give at least one run folder.")
    text = page(runs, failures)
    disk.write_text(path, text)
    return path


def page(runs: Sequence[Run], failures: Sequence[tables.Failure] = ()) -> str:
    """The page's whole text."""
    assets = resources.files("rkfac_lab") / "assets"
    parts = {name: (assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    style = parts["page.css"]
    script = "\n".join(parts[name] for name in SCRIPTS)
    data = contents(runs, failures)
    return Template(parts["page.html"]).substitute(
        title=html.escape(", ".join(group["workload"] for group in data["groups"])),
        style=style,
        style_hash=_policy_hash(style),
        script=script,
        script_hash=_policy_hash(script),
        data=embedded_json(data),
    )


def embedded_json(value: Any) -> str:
    """JSON that no HTML parser takes for markup: every "<" is escaped, so neither "</script>" nor "<!--" can occur."""
    text = json.dumps(record.finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def contents(runs: Sequence[Run], failures: Sequence[tables.Failure] = ()) -> dict[str, Any]:
    """What the page shows, as plain values: one group a workload, in order of first appearance."""
    workloads: dict[str, list[Run]] = {}
    for run in runs:
        workloads.setdefault(str(run.summary["workload"]), []).append(run)
    groups = [_group(name, members, failures if len(workloads) == 1 else ()) for name, members in workloads.items()]
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"created": created, "version": metadata.version("rkfac"), "groups": groups}


def _group(workload: str, runs: Sequence[Run], failures: Sequence[tables.Failure]) -> dict[str, Any]:
    metrics = _metrics(runs)
    optimizers = [
        {
            "label": label,
            "slot": position % len(plots.PALETTE),
            # A second cue beside colour, shifted at every round so that a ninth line differs from the first.
            "dash": (position + position // len(plots.PALETTE)) % DASHES,
            "bands": {metric: _band(members, metric) for metric in metrics},
        }
        for position, (label, members) in enumerate(tables.group_by_label(runs).items())
    ]
    return {
        "workload": workload,
        "metrics": metrics,
        "machines": _machines(runs),
        "optimizers": optimizers,
        "table": table_text.to_json(tables.table1(runs, failures)),
        "promises": promise_text.to_json(promises(runs, failures)),
        "runs": [_run(run, metrics) for run in runs],
    }


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The measured quantities worth a curve, the one the comparison is about first."""
    measured = {
        name
        for run in runs
        for epoch in run.epochs
        for name, value in epoch.items()
        if name.startswith(("test_", "train_", "validation_")) and name != "train_seconds" and value is not None
    }
    first = tables.main_metric(runs)[0]
    order = [first, *FIRST_METRICS, *sorted(measured)]
    return [name for name in dict.fromkeys(order) if name in measured] or [first]


def _band(runs: Sequence[Run], metric: str) -> dict[str, list[Any]]:
    over_epochs = plots.band(runs, metric, "epoch")
    return {
        "epoch": [_short(x) for x in over_epochs.x.tolist()],
        "seconds": plots.band(runs, metric, "train_seconds").x.tolist(),
        "middle": over_epochs.middle.tolist(),
        "low": over_epochs.low.tolist(),
        "high": over_epochs.high.tolist(),
    }


def _run(run: Run, metrics: Sequence[str]) -> dict[str, Any]:
    summary = run.summary
    return {
        "name": run.path.name,
        "label": tables.label_of(run),
        "seed": summary.get("seed"),
        "status": summary.get("status", "unknown"),
        "targets": summary.get("targets", []),
        "remarks": _remarks(run),
        "config": run.config,
        "environment": run.environment,
        "epochs": {
            "epoch": [_short(plots.abscissa(line, "epoch")) for line in run.epochs],
            **{name: [line.get(name) for line in run.epochs] for name in ("train_seconds", *metrics)},
        },
        "layers": _layers(run),
    }


def _remarks(run: Run) -> list[str]:
    """What a reader must know about a run before trusting its numbers."""
    said = []
    status = run.summary.get("status", "unknown")
    if status != "finished":
        said.append(f"{'unfinished' if status == 'running' else status} after {len(run.epochs)} evaluations.")
    if not ends_whole(run.path / record.METRICS):
        said.append(f"the last line of {record.METRICS} was cut off while it was written and is left out.")
    return said


def _machines(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The different machines and versions the runs were made with, and from when to when."""
    days: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        facts = run.environment
        name = str(facts.get("processor") or facts.get("machine") or "Machine not recorded")
        counts = [f"{facts[key]} {unit}" for key, unit in (("cpus", "CPUs"), ("threads", "threads")) if facts.get(key)]
        size = ", ".join([*([f"device {facts['device']}"] if facts.get("device") else []), *counts])
        versions = facts.get("versions", {})
        named = ", ".join(f"{package} {versions[package]}" for package in VERSIONS if package in versions)
        days.setdefault((name, size, named), []).append(str(facts.get("date", ""))[:10])
    return [
        {"name": name, "size": size, "versions": versions, "dates": " to ".join(sorted({min(dates), max(dates)}))}
        for (name, size, versions), dates in days.items()
    ]


def _layers(run: Run) -> dict[str, Any]:
    """The layers records turned round: one entry a layer, with a list over the records for each quantity."""
    records = [{layer["name"]: layer for layer in record["layers"]} for record in run.layers]
    items = []
    for name, last in records[-1].items() if records else ():
        facts = {fact: last.get(fact) for fact in LAYER_FACTS}
        history = {field: [_short(record.get(name, {}).get(field)) for record in records] for field in LAYER_SERIES}
        seconds = [record.get(name, {}).get("seconds") or {} for record in records]
        items.append(facts | history | {"seconds": _accumulated(seconds)})
    return {
        "epoch": [_short(plots.abscissa(record, "epoch")) for record in run.layers],
        "train_seconds": [record["train_seconds"] for record in run.layers],
        "items": items,
    }


def _accumulated(clocks: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Seconds by phase over a whole run; an optimizer's clocks start again from zero where the run was resumed."""
    total: dict[str, float] = {}
    before: dict[str, float] = {}
    for clock in clocks:
        for phase, seconds in clock.items():
            since = before.get(phase, 0.0)
            total[phase] = total.get(phase, 0.0) + (seconds - since if seconds >= since else seconds)
        before = clock
    return total or None


def _short(value: float | None) -> float | None:
    """Six digits: these lists are most of the page, and nobody reads more of a rank or a damping."""
    return float(f"{value:.6g}") if value is not None else None


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

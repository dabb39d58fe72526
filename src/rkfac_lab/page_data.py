"""What the HTML page shows, as plain values: tables, curves, layers, where the runs come from, what to beware of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rkfac_lab import budgets, origin, plots, promise_text, provenance, record, table_text, tables
from rkfac_lab.metrics import ends_whole
from rkfac_lab.origin import Origin
from rkfac_lab.promise import promises
from rkfac_lab.record import Run

FIRST_METRICS = ("test_accuracy", "test_error", "test_loss", "train_loss")
ABSCISSAS = {"seconds": "train_seconds", "cpu_seconds": "cpu_seconds", "step": "step", "epoch": "epoch"}
DASHES = len(plots.DASHES)
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


def contents(
    runs: Sequence[Run], failures: Sequence[tables.Failure] = (), reference: str | None = None
) -> dict[str, Any]:
    """What the page shows: one group a workload and, where an optimizer had several budgets, one a budget."""
    workloads: dict[str, list[Run]] = {}
    for run in runs:
        workloads.setdefault(str(run.summary["workload"]), []).append(run)
    parts = [(name, budgets.apart(members)) for name, members in workloads.items()]
    alone = len(parts) == 1 and len(parts[0][1]) == 1
    groups = [
        _group(name, members, failures if alone else (), reference if alone else None, _warnings(members, apart))
        for name, apart in parts
        for members in apart
    ]
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"created": created, "version": metadata.version("rkfac"), "groups": groups}


def _group(
    workload: str,
    runs: Sequence[Run],
    failures: Sequence[tables.Failure],
    reference: str | None,
    warnings: Sequence[str],
) -> dict[str, Any]:
    origins = {run.path: found for run in runs if (found := origin.of_run(run.path))}
    settings = _settings(runs, origins)
    runs = budgets.told_apart(runs)
    metrics = _metrics(runs)
    groups = tables.group_by_label(runs)
    places = plots.positions(groups)
    optimizers = [
        {
            "label": label,
            "slot": places[label] % len(plots.PALETTE),
            # A second cue beside colour, shifted at every round so that a ninth line differs from the first.
            "dash": (places[label] + places[label] // len(plots.PALETTE)) % DASHES,
            "settings": members[0].config.get("optimizer", {}).get("arguments", {}),
            "chosen": settings[members[0].path],
            "rate": _rate(members[0]),
            "budget": budgets.budget(members[0]),
            "bands": {metric: _band(members, metric) for metric in metrics},
        }
        for label, members in groups.items()
    ]
    table = tables.table1(runs, failures)
    rows = {row.label for row in table.rows}
    wanted = [reference, *(found.reference for found in origins.values())]
    return {
        "workload": workload,
        "budget": "; ".join(filter(None, budgets.budgets(runs))),
        "warnings": [*warnings, *_mixed_machines(runs)],
        "metrics": metrics,
        "machines": provenance.machines(runs),
        "optimizers": optimizers,
        "table": table_text.to_json(table, next((name for name in wanted if name in rows), None)),
        "csv": table_text.to_csv(table),
        "promises": promise_text.to_json(promises(runs, failures)),
        "commands": list(dict.fromkeys(found.command for found in origins.values())),
        "runs": [_run(run, metrics) for run in runs],
    }


def _rate(run: Run) -> str:
    """How the learning rate and whatever else is scheduled goes over the run; empty where it was not recorded."""
    shape, schedule = run.config.get("lr_shape"), run.config.get("schedule") or {}
    said = [f"learning rate {shape} over the run"] if shape and "lr" not in schedule else []
    said += [f"{key} {', '.join(f'{v:g} from epoch {e}' for e, v in steps.items())}" for key, steps in schedule.items()]
    return "; ".join(said)


def _settings(runs: Sequence[Run], origins: Mapping[Path, Origin]) -> dict[Path, str]:
    """How each run's optimizer came by its settings: as its comparison says, else by what the run recorded."""
    said = {path: found.chosen for path, found in origins.items()}
    return {
        run.path: said.get(run.path, {}).get(tables.label_of(run)) or origin.chosen_of_run(run.config) for run in runs
    }


def _warnings(runs: Sequence[Run], apart: Sequence[Sequence[Run]]) -> list[str]:
    """What must be said about budgets: that there are others on the page, or that these runs had different ones."""
    if len(apart) > 1:
        names = "; ".join(budgets.budget(members[0]) or "not recorded" for members in apart)
        return [f"Runs of this workload had different budgets ({names}). They are shown apart: choose one above."]
    found = budgets.budgets(runs)
    if len(found) < 2:
        return []
    whose = "; ".join(
        f"{', '.join(tables.group_by_label(members))}: {name or 'not recorded'}" for name, members in found.items()
    )
    return [f"These optimizers had different budgets, and their curves and times are of different trainings ({whose})."]


def _mixed_machines(runs: Sequence[Run]) -> list[str]:
    several = len(provenance.machines(runs)) > 1
    said = "These runs come from different machines, thread counts or versions: their seconds do not compare."
    return [said] if several else []


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
    """Median and range over seeds at each evaluation, and where it stands on each axis that all of them measured."""
    shared = {
        name: field
        for name, field in ABSCISSAS.items()
        if all(line.get(field) is not None for run in runs for line in run.epochs)
    }
    columns = plots.meetings(runs, metric)
    values = [[float(line[metric]) for line in column] for column in columns]
    return {
        **{
            name: [_short(median(plots.abscissa(line, field) for line in column)) for column in columns]
            for name, field in shared.items()
        },
        "middle": [median(value) for value in values],
        "low": [min(value) for value in values],
        "high": [max(value) for value in values],
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
        "command": origin.train_command(run.config) if run.config else "",
        "config": run.config,
        "environment": run.environment,
        "epochs": {
            "epoch": [_short(plots.abscissa(line, "epoch")) for line in run.epochs],
            "seconds": [line["train_seconds"] for line in run.epochs],
            **{name: [line.get(name) for line in run.epochs] for name in ("cpu_seconds", "step", *metrics)},
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
        "seconds": [record["train_seconds"] for record in run.layers],
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

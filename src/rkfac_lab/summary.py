"""Several comparisons at a glance: two tables from the `table.json` of each, as Markdown, printed or put into a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rkfac_lab import disk, slots
from rkfac_lab.errors import LabError
from rkfac_lab.table_text import as_markdown, metric_value, target_title
from rkfac_lab.tables import Target

REMEDY = "Make it again with `rkfac compare`."
Comparison = Mapping[str, Any]  # what a table.json holds


def read(folder: Path) -> Comparison:
    """The numbers of one comparison."""
    path = folder / "table.json"
    try:
        found = disk.read_json(path, REMEDY)
    except FileNotFoundError:
        raise LabError(f"'{folder}' holds no table.json; give a folder that `rkfac compare` wrote.") from None
    if not isinstance(found, dict) or not {"workload", "metric", "rows", "targets", "promises"} <= found.keys():
        raise disk.damaged(path, "it is not what a comparison writes", REMEDY)
    return found


def summary(comparisons: Sequence[Comparison]) -> str:
    """Both tables."""
    return "\n\n".join(
        (
            "A K-FAC in the place of a baseline, with its own tuned numbers and nothing re-tuned: what it spends until it is "
            "as good as the baseline's best, divided by what the baseline spent until then.",
            as_markdown(*_promises(comparisons)),
            "To each target, divided by the baseline that reached it most often and with the least CPU seconds: steps (CPU "
            "seconds). A dash: not in every run.",
            as_markdown(*_targets(comparisons)),
        )
    )


def numbers(comparisons: Sequence[Comparison]) -> dict[str, list[dict[str, str]]]:
    """Both tables row by row."""
    tables = {"promises": _promises(comparisons), "targets": _targets(comparisons)}
    return {name: [dict(zip(header, line, strict=True)) for line in lines] for name, (header, lines) in tables.items()}


def _promises(comparisons: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    header = ["workload", "in the place of", "seeds", "steps", "CPU seconds", "baseline's best", "K-FAC's best"]
    lines = []
    for made in comparisons:
        best = {row["label"]: row["best"] for row in made["rows"]}
        for promise in made["promises"]:
            reached = sum(arrival["kfac"] is not None for arrival in promise["arrivals"])
            lines.append(
                [
                    made["workload"],
                    promise["baseline"],
                    f"{reached} of {len(promise['arrivals'])}",
                    _spread(promise["steps"]),
                    _spread(promise["cpu_seconds"]),
                    _value(made["metric"], best.get(promise["baseline"])),
                    _value(made["metric"], best.get(promise["label"])),
                ]
            )
    return header, lines


def _targets(comparisons: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    contenders = list(
        dict.fromkeys(row["label"] for made in comparisons for row in made["rows"] if not row["baseline"])
    )
    lines = []
    for made in comparisons:
        rows = {row["label"]: row for row in made["rows"]}
        for index, target in enumerate(made["targets"]):
            against = _best_baseline(made, index)
            if against is None:
                continue
            unit = rows[against]["targets"][index]
            cells = [_ratio(rows[name]["targets"][index], unit) if name in rows else "" for name in contenders]
            who = f"{against} ({unit['hits']} of {unit['runs']})"
            lines.append([made["workload"], target_title(Target(**target)), who, *cells])
    return ["workload", "target", "best baseline", *contenders], lines


def _best_baseline(made: Comparison, index: int) -> str | None:
    """Who reached a target most often, and with the least CPU seconds; None: nobody."""
    reached = [
        (-found["hits"], found["cpu_seconds"]["mean"], row["label"])
        for row in made["rows"]
        for found in (row["targets"][index],)
        if row["baseline"] and found["hits"] and found["cpu_seconds"]
    ]
    return min(reached)[2] if reached else None


def _ratio(own: Mapping[str, Any], unit: Mapping[str, Any]) -> str:
    if own["hits"] < own["runs"] or not own["cpu_seconds"]:
        return "-" if not own["hits"] else f"- ({own['hits']} of {own['runs']})"
    steps, seconds = (own[part]["mean"] / unit[part]["mean"] for part in ("steps", "cpu_seconds"))
    return f"{steps:.2f} ({seconds:.2f})"


def _spread(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['mean']:.2f}" + ("" if found["std"] is None else f" ± {found['std']:.2f}")


def _value(metric: str, found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else metric_value(metric, found["mean"])


def put_into(page: Path, text: str) -> None:
    """In the place that a page has for it."""
    slots.fill(page, "summary", text)

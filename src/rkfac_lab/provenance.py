"""What made the runs of a comparison: the command, the machines and versions, and each optimizer's settings and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rkfac_lab import origin
from rkfac_lab.harmless import markdown, visible
from rkfac_lab.record import Run
from rkfac_lab.tables import group_by_label

VERSIONS = ("rkfac", "torch", "numpy", "python")


def machines(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The different machines and versions the runs were made with, and from when to when."""
    days: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        facts = run.environment
        name = str(facts.get("processor") or facts.get("machine") or "Machine not recorded")
        counts = [
            f"{facts[key]} {unit}{'s' * (facts[key] != 1)}"
            for key, unit in (("cpus", "CPU"), ("threads", "thread"))
            if facts.get(key)
        ]
        size = ", ".join([*([f"device {facts['device']}"] if facts.get("device") else []), *counts])
        versions = facts.get("versions", {})
        named = ", ".join(f"{package} {versions[package]}" for package in VERSIONS if package in versions)
        days.setdefault((name, size, named), []).append(str(facts.get("date", ""))[:10])
    return [
        {"name": name, "size": size, "versions": versions, "dates": " to ".join(sorted({min(dates), max(dates)}))}
        for (name, size, versions), dates in days.items()
    ]


def to_json(runs: Sequence[Run]) -> dict[str, Any]:
    """As plain values."""
    found = (origin.of_run(run.path) for run in runs)
    return {
        "commands": list(dict.fromkeys(kept.command for kept in found if kept is not None)),
        "machines": machines(runs),
        "optimizers": {
            label: {
                "seeds": [run.config.get("seed") for run in members],
                "settings": members[0].config.get("optimizer", {}).get("arguments", {}),
            }
            for label, members in group_by_label(runs).items()
        },
    }


def to_markdown(told: Mapping[str, Any]) -> str:
    """What `to_json` found, below a table."""
    parts = [f"    {visible(command)}" for command in told["commands"]]
    parts.append("\n".join(_line(label, **known) for label, known in told["optimizers"].items()))
    facts = (filter(None, (one["name"], one["size"], one["versions"], one["dates"])) for one in told["machines"])
    parts.append(markdown("; ".join(", ".join(own) for own in facts)))
    return "\n\n".join(["\nMade by:", *parts]) + "\n"


def _line(label: str, seeds: Sequence[int | None], settings: dict[str, Any]) -> str:
    given = ", ".join(f"{key} {value}" for key, value in settings.items()) or "its own defaults"
    which = "not recorded" if None in seeds else ", ".join(map(str, seeds))
    return f"- {markdown(f'{label}: {given} (seeds {which})')}"

"""Where runs come from: the command that makes them again, and how each optimizer came by its settings.

A comparison keeps both in its folder (`comparison.json`), so that a page made later can say them, and what it was told,
so that it can be continued without being told again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rkfac_lab import config as configuration
from rkfac_lab import disk
from rkfac_lab.comparison import Comparison
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import LabError
from rkfac_lab.plans import Plan
from rkfac_lab.structure import checked
from rkfac_lab.tuning import Search
from rkfac_lab.workloads import WORKLOADS

FILE = "comparison.json"
RUNS = "runs"  # the folder of a comparison's runs, beside the file
REMEDY = "repair it, or delete it and do without what it says"


@dataclass(frozen=True)
class Origin:
    """The command of a comparison, the row it divides by, and for each label a sentence on its settings."""

    command: str
    reference: str | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None  # None: kept by a version that could not continue it without its options


def of_comparison(
    comparison: Comparison,
    search: Search | None = None,
    tuned: Path | None = None,
    reference: str | None = None,
    sentences: Mapping[str, str] | None = None,
) -> Origin:
    """What to keep of a comparison; `sentences` are those of its tuning, by contender."""
    chosen = {}
    for contender in comparison.contenders:
        config = comparison.config(contender, 0)
        chosen[config.name] = (sentences or {}).get(contender) or how_chosen(configuration.resolve(config))
    plan = Plan.of(comparison, search, tuned, reference)
    return Origin(plan.command(), reference, chosen, plan)


def keep(origin: Origin, folder: Path) -> None:
    """Write it into the comparison's folder."""
    disk.write_text(folder / FILE, json.dumps(asdict(origin), indent=2) + "\n")


def of_run(run: Path) -> Origin | None:
    """What the comparison kept that this run folder belongs to; None if it belongs to none."""
    return kept(run.parent.parent) if run.parent.name == RUNS else None


def kept(folder: Path) -> Origin | None:
    """What lies in a comparison's folder; None if there is nothing."""
    path = folder / FILE
    try:
        values = disk.read_json(path, REMEDY)
    except FileNotFoundError:
        return None
    try:
        found: Origin = checked(values, Origin)
    except LabError as error:
        raise disk.damaged(path, str(error), REMEDY) from error
    return found


def how_chosen(config: RunConfig) -> str:
    """A sentence on the settings of a run that nobody tuned: the workload's (or the paper's) own, or what was given."""
    chosen = config.optimizer
    bare = RunConfig(workload=config.workload, optimizer=configuration.OptimizerConfig(chosen.name, chosen.preset))
    own = configuration.resolve(bare).to_dict()["optimizer"]["arguments"]
    given = config.to_dict()["optimizer"]["arguments"]
    other = [
        f"{key} = {_said(given, key)} (its own: {_said(own, key)})"
        for key in dict.fromkeys([*own, *given])
        if _said(own, key) != _said(given, key)
    ]
    but = f" but for {', '.join(other)}" if other else ""
    return f"not tuned: {'the paper' if chosen.preset == 'paper' else 'the workload'}'s own settings{but}."


def chosen_of_run(config: Mapping[str, Any]) -> str:
    """The same of a run as it was recorded; nothing that it names is imported."""
    unknown = "as given; how they were chosen was not recorded."
    if config.get("workload") not in WORKLOADS or ":" in str(config.get("optimizer", {}).get("name")):
        return unknown
    try:
        return how_chosen(configuration.from_dict(config))
    except LabError:  # an optimizer that this version does not know
        return unknown


def train_command(config: Mapping[str, Any]) -> str:
    """The `rkfac train` with all the settings a run was recorded with."""
    plain, defaults = configuration.from_dict(config).to_dict(), RunConfig().to_dict()
    chosen, schedule = plain.pop("optimizer"), plain.pop("schedule")
    settings = {"optimizer.name": chosen["name"], "optimizer.preset": chosen["preset"] or None}
    settings |= {f"optimizer.arguments.{key}": value for key, value in chosen["arguments"].items()}
    settings |= {f"schedule.{key}": value for key, value in schedule.items()}
    settings |= {key: value for key, value in plain.items() if value != defaults[key] and key != "workload"}
    words = [f"--set={key}={_toml(value)}" for key, value in settings.items() if value is not None]
    return shlex.join(["rkfac", "train", plain["workload"], *words])


def _said(arguments: Mapping[str, Any], key: str) -> str:
    return _toml(arguments[key]) if key in arguments else "the default"


def _toml(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)

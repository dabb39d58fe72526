"""Which runs may be averaged: those that differ in nothing but their seed; and what they were allowed to spend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rkfac_lab.identity import HARMLESS
from rkfac_lab.record import Run
from rkfac_lab.tables import group_by_label, label_of

NOT_COMPARED = ("seed", *HARMLESS)


def budget(run: Run) -> str:
    """What a run was allowed to spend, in words; empty where it was not recorded."""
    return in_words(run.config)


def in_words(config: Mapping[str, Any]) -> str:
    """The limits that a configuration sets; those it does not name are none."""
    said = [f"{config['epochs']} epoch{'s' * (config['epochs'] != 1)}"] if config.get("epochs") else []
    said += [f"at most {config['max_steps']} steps"] if config.get("max_steps") else []
    said += [f"at most {config['time_budget']:g} seconds"] if config.get("time_budget") else []
    said += [f"batches of {config['batch_size']}"] if config.get("batch_size") else []
    return ", ".join(said)


def budgets(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by budget, in order of first appearance."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(budget(run), []).append(run)
    return found


def apart(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of one workload in parts that stand beside each other: by budget, where a label has runs of several.

    Optimizers that each have one budget of their own stay together: somebody compared just that.
    """
    several = any(len(budgets(members)) > 1 for members in group_by_label(runs).values())
    return list(budgets(runs).values()) if several else [list(runs)]


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The same runs; those of one label that differ in more than the seed have what differs in their label."""
    suffixes = {label: _differences(members) for label, members in group_by_label(runs).items()}

    def named(run: Run) -> Run:
        suffix = suffixes[label_of(run)].get(_key(run), "")
        return replace(run, summary={**run.summary, "label": f"{label_of(run)} ({suffix})"}) if suffix else run

    return [named(run) for run in runs]


def _differences(runs: Sequence[Run]) -> dict[str, str]:
    """For each configuration among runs of one label, the settings in which it is not like the others."""
    variants = {_key(run): flat(_compared(run)) for run in runs}
    keys = list(dict.fromkeys(key for variant in variants.values() for key in variant))
    different = [key for key in keys if len({json.dumps(variant.get(key)) for variant in variants.values()}) > 1]
    return {
        name: ", ".join(f"{key.rpartition('.')[2]} {_said(variant.get(key))}" for key in different)
        for name, variant in variants.items()
    }


def _compared(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if key not in NOT_COMPARED}


def _key(run: Run) -> str:
    return json.dumps(_compared(run), sort_keys=True)


def _said(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value)


def flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = flat(value, f"{where}{key}.") if isinstance(value, dict) and value else {f"{where}{key}": value}
        found.update(inner)
    return found

"""What became of the promise as text: one sentence a pair, and a table with a line a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.table import Table as RichTable

from rkfac_lab.harmless import markdown, visible
from rkfac_lab.promise import MEASURES, Arrival, Promise, less
from rkfac_lab.table_text import as_markdown, as_rich, metric_name, metric_value
from rkfac_lab.tables import Spread

TITLE = "In another's place: spent until as good as its best / spent by it (below 1 is sooner)"
UNITS = {"steps": "steps", "cpu_seconds": "CPU seconds", "seconds": "seconds"}
SAID = ("steps", "seconds")


def sentence(promise: Promise) -> str:
    """What became of one pair, good or bad, in one sentence."""
    missed = len(promise.arrivals) - promise.reached
    seeds = f"{len(promise.arrivals)} seed{'s' * (len(promise.arrivals) != 1)}"
    who = f"With {_numbers(promise)} {promise.name}"
    if not promise.reached:
        return visible(f"{who} never reached {_goal(promise)} (0 of {seeds}).")
    if missed:
        rest = "the other it" if promise.reached == 1 else f"the other {promise.reached} it"
        return visible(f"{who} never reached {_goal(promise)} in {missed} of {seeds}; in {rest} {_spent(promise, '')}.")
    return visible(f"{who} {_spent(promise, f'reached {_goal(promise)} ')} ({promise.reached} of {seeds}).")


def to_markdown(promises: Sequence[Promise]) -> str:
    """The table and the sentences as GitHub-flavoured Markdown; nothing where there is no pair."""
    if not promises:
        return ""
    sentences = [markdown(sentence(promise)) for promise in promises]
    return "\n\n".join([f"\n{markdown(TITLE)}:", as_markdown(*_cells(promises)), *sentences]) + "\n"


def to_rich(promises: Sequence[Promise]) -> list[RichTable]:
    """The table for the terminal; none where there is no pair."""
    return [as_rich(TITLE, *_cells(promises))] if promises else []


def to_json(promises: Sequence[Promise]) -> list[dict[str, Any]]:
    """Everything as plain numbers, lists and dicts, with the sentence."""
    return [
        {**asdict(promise), "reached": promise.reached, "seeds": len(promise.arrivals), "sentence": sentence(promise)}
        for promise in promises
    ]


def _numbers(promise: Promise) -> str:
    kept = f"{promise.baseline}'s own numbers"
    kept += f" except {_listed(promise.other)}" if promise.other else ""
    return kept + (f" and {_listed(promise.added)} beside them" if promise.added else "")


def _goal(promise: Promise) -> str:
    best = fmean(arrival.best for arrival in promise.arrivals)
    name = promise.metric.replace("_", " ")
    return f"{promise.baseline}'s best {name} ({metric_value(promise.metric, best)})"


def _spent(promise: Promise, reached: str) -> str:
    """Less is "after", more is "needed": a reader must not take one for the other."""
    known = [(getattr(promise, measure), UNITS[measure]) for measure in SAID]
    ratios = [(found.mean, unit) for found, unit in known if found is not None]
    fewer = [f"{ratio:.2f} of its {unit}" for ratio, unit in ratios if less(ratio)]
    more = [f"{ratio:.2f} times its {unit}" for ratio, unit in ratios if not less(ratio)]
    after = f"{reached or 'was there '}after {_listed(fewer)}" if fewer else reached.strip()
    needed = f"needed {_listed(more)}" if more else ""
    return " but ".join(part for part in (after, needed) if part)


def _cells(promises: Sequence[Promise]) -> tuple[list[str], list[list[str]]]:
    header = ["optimizer", "seed", "to reach", *(UNITS[measure] for measure in MEASURES)]
    lines = []
    for promise in promises:
        for arrival in promise.arrivals:
            goal = f"{metric_name(promise.metric)} {metric_value(promise.metric, arrival.best)}"
            lines.append(
                [promise.label, str(arrival.seed), goal, *(_seed_cell(arrival, measure) for measure in MEASURES)]
            )
        share = f"{promise.reached} of {len(promise.arrivals)}"
        lines.append([promise.label, "mean", share, *(_mean_cell(getattr(promise, measure)) for measure in MEASURES)])
    return header, lines


def _seed_cell(arrival: Arrival, measure: str) -> str:
    its = getattr(arrival.baseline, measure)
    mine = getattr(arrival.kfac, measure) if arrival.kfac else None
    if arrival.kfac is None:
        return f"not reached / {_amount(its)}"
    if mine is None or not its:
        return f"{_amount(mine)} / {_amount(its)}"
    return f"{_amount(mine)} / {_amount(its)} = {mine / its:.2f}"


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _mean_cell(ratio: Spread | None) -> str:
    if ratio is None:
        return "not reached"
    return f"{ratio.mean:.2f}" if ratio.std is None else f"{ratio.mean:.2f} ± {ratio.std:.2f}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

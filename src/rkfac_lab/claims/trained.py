"""What the claims about trainings read off a run: when it came to a target, where it ended, and curves over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rkfac_lab.record import Run


def outcome(run: Run, target: float) -> dict[str, Any]:
    """Steps to an accuracy, the one at the end (of a run that came to its end), and all of them."""
    curve = [[line["step"], line["test_accuracy"]] for line in run.epochs]
    first = next((step for step, accuracy in curve if accuracy >= target), None)
    finished = run.summary["status"] == "finished" and curve
    return {"steps": first, "end": curve[-1][1] if finished else None, "curve": curve}


def mean_curve(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Steps that all seeds have, and the mean accuracy there."""
    curves = [dict(map(tuple, row["curve"])) for row in rows]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return steps, [statistics.fmean(curve[step] for curve in curves) for step in steps]

"""A number of modes that was foreseen beside the one that was seen: as a case, as a rule, as cells of a table, as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from rkfac.theory import effective_samples, expected_modes, expected_spectrum, retained_modes
from rkfac_lab.claims import drawing
from rkfac_lab.claims.looks import curve, modes
from rkfac_lab.claims.text import around
from rkfac_lab.plots import SIDES
from rkfac_lab.spectrum import ASSUMED_ALPHA, NEGLIGIBLE

NEAR, FEW = 0.10, 3.0  # a prediction is right within this share of what was seen, or within so many modes
HEADER = ("rho", "rows a batch", "rows that count", "updates", "predicted", "seen", "right", "Proposition 3.1")
Case = Mapping[str, Any]


def case(covariance: Tensor, rho: float, n: int, count: int) -> dict[str, Any]:
    """What can be said of n independent rows a batch before anything is seen."""
    return {
        "d": len(covariance),
        "rho": rho,
        "n": n,
        "updates": count,
        "counts": effective_samples(rho, n),
        "predicted": expected_modes(covariance, rho, n, NEGLIGIBLE, count),
        "bound": retained_modes(rho, n, len(covariance), ASSUMED_ALPHA, NEGLIGIBLE),
    }


def of_layer(covariance: Tensor, said: Case, worth: float, values: Sequence[Tensor]) -> dict[str, Any]:
    """Of a layer: what was seen, spectra to be drawn, and what the rows that each of its rows is worth would make of it."""
    rho, n, count = said["rho"], said["n"], said["updates"]
    worthy = max(1, round(n * worth))
    return {
        "seen": [modes(one) for one in values],
        "measured": curve(values[0]),
        "expected": curve(expected_spectrum(covariance, rho, n, count)),
        "corrected": curve(expected_spectrum(covariance, rho, worthy, count)),
        "true": curve(covariance),
        "covered": modes(covariance),
        "worth": worth,
        "predicted by worth": expected_modes(covariance, rho, worthy, NEGLIGIBLE, count),
    }


def near(number: float, case: Case) -> bool:
    """Whether a number is within 10 % or 3 modes of what was seen on average."""
    mean = statistics.fmean(case["seen"])
    return bool(abs(number - mean) <= max(NEAR * mean, FEW))


def foreseen(case: Case) -> bool:
    """Whether the prediction of independent rows is right."""
    return near(case["predicted"], case)


def cells(case: Case) -> list[str]:
    """Those of `HEADER`."""
    known = [f"{case['rho']:g}", str(case["n"]), f"{case['counts']:.0f}", str(case["updates"])]
    seen = [f"{case['predicted']:.1f}", around(case["seen"]), said(foreseen(case))]
    return [*known, *seen, str(case["bound"])]


def said(right: bool) -> str:
    """In a word."""
    return "yes" if right else "no"


def by(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    """In groups, in the order in which they come."""
    grouped: dict[str, list[Case]] = {}
    for one in cases:
        grouped.setdefault(key(one), []).append(one)
    return grouped


def against(panels: Mapping[str, Mapping[str, Sequence[Case]]]) -> Figure:
    """Title by title predicted against seen; a point on the line is a number that was foreseen."""
    figure, frames = drawing.panels(len(panels), across="modes predicted", up="modes seen (mean)")
    for axes, (title, cases) in zip(frames, panels.items(), strict=True):
        every = [one for group in cases.values() for one in group]
        numbers = [number for one in every for number in (one["predicted"], statistics.fmean(one["seen"]))]
        ends = [0.7 * min(numbers), 1.3 * max(numbers)]
        axes.plot(ends, ends, color="#999999", linewidth=0.9, label="as foreseen")
        # The margin is not straight: 3 modes are wider below 30.
        line = [ends[0] * (ends[1] / ends[0]) ** (at / 50) for at in range(51)]
        low, high = ([max(x + sign * max(NEAR * x, FEW), ends[0]) for x in line] for sign in (-1, 1))
        axes.fill_between(line, low, high, color="#eeeeee", label="within 10 % or 3 modes")
        for position, (name, group) in enumerate(cases.items()):
            look = {**drawing.look(position, marked=True), "linestyle": "none"}
            axes.plot([c["predicted"] for c in group], [statistics.fmean(c["seen"]) for c in group], **look, label=name)
        if ends[1] > 10 * ends[0]:  # below a decade one tick would be left
            drawing.logarithmic(axes.xaxis)
            drawing.logarithmic(axes.yaxis)
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def spectra(cases: Mapping[str, Case]) -> Figure:
    """Title by title what was seen, what was foreseen, the covariance itself, and the worst case."""
    figure, panels = drawing.panels(len(cases), across="mode", up="eigenvalue / largest", same_height=True)
    names = {
        "measured": "seen",
        "expected": "predicted",
        "corrected": "predicted by worth",
        "true": "the covariance itself",
    }
    for axes, (title, one) in zip(panels, cases.items(), strict=True):
        for position, (key, label) in enumerate(names.items()):
            axes.plot(*zip(*one[key], strict=True), **drawing.look(position), label=label)
        axes.plot(*_worst(one), color="#777777", linewidth=1.0, label="Proposition 3.1, at most")
        drawing.as_spectrum(axes, NEGLIGIBLE, "a 33rd", title)
    return figure


def _worst(case: Case) -> tuple[list[int], list[float]]:
    """How many eigenvalues there may be above each height."""
    heights = [10 ** (-at / 20) for at in range(1, 101)]
    return [retained_modes(case["rho"], case["n"], case["d"], ASSUMED_ALPHA, one) for one in heights], heights


def title(case: Case) -> str:
    """Of a picture of a layer's factor."""
    return f"{SIDES[case['side']]}, rho {case['rho']:g}, {case['n']} rows a batch, lr {case['lr']:g}"

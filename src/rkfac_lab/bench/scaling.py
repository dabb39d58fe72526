"""`rkfac bench scaling`: seconds of refresh and application against the width of one square Linear layer.

Application is all that optimizer.step() does on a plain step. The exponents are slopes of a line through the measured
points, logarithm against logarithm; what was not measured is not extrapolated. Averages have seen more rows than the
layer is wide before anything is timed: LAPACK is faster on matrices of low rank. A step of any optimizer reads and writes the
whole weight, so that no application grows slower than the square of the width for long; what SGD's own step takes is
measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from torch import nn

from rkfac_lab.bench import streams
from rkfac_lab.bench.contestants import chosen
from rkfac_lab.bench.entrant import Entrant
from rkfac_lab.bench.outcome import MEDIANS, outcome
from rkfac_lab.bench.problems import Problem
from rkfac_lab.bench.step import race
from rkfac_lab.bench.timing import Spread

WIDTHS = (1024, 2048, 4096, 8192)
EXACT = "K-FAC (paper)"
METHODS = (EXACT, "RS-KFAC (paper)", "SRE-KFAC (paper)", "SENG (paper)", "SENG (paper, exact product)")
PARTS = ("refresh", "application", "both", "beyond")
BATCH = 256


@dataclass(frozen=True)
class Measurement:
    """One method at one width: seconds of one refresh and of one application, and of a whole step() of SGD's."""

    width: int
    method: str
    refresh: Spread
    application: Spread
    sgd: Spread

    @property
    def both(self) -> Spread:
        """One of each."""
        return Spread.through(lambda part: sum(part.values()), {"r": self.refresh, "a": self.application})

    @property
    def beyond(self) -> Spread:
        """One of each, without what SGD's step takes."""
        own = {"r": self.refresh, "a": self.application, "s": self.sgd}
        return Spread.through(lambda part: part["r"] + part["a"] - part["s"], own)


def problem(width: int, rank: int) -> Problem:
    """A square Linear layer without bias that classifies signals into as many classes as it is wide."""
    enough = -(-5 * width // (4 * BATCH))  # batches for averages of full rank
    return Problem(
        f"Linear {width}",
        lambda: nn.Linear(width, width, bias=False),
        lambda: streams.signals(BATCH, width, width, pool=enough),
        streams.DESCRIPTIONS["signals"],
        warm_up=enough,
        plain=3,
        statistics=1,
        kfac={"rank": rank},
    )


def run(
    widths: Sequence[int] = WIDTHS,
    rank: int = 220,
    exact_up_to: int = 4096,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every method at every width, the exact one up to a width only."""
    rows = []
    for width in widths:
        layer = problem(width, rank)
        everyone = chosen(layer, METHODS)
        methods = {name: everyone[name] for name in METHODS if name != EXACT or width <= exact_up_to}
        sgd, *others = race(layer, {"SGD": everyone["SGD"], **methods}, rounds, progress)
        for entrant in others:
            refresh = Spread.of(entrant.phases["refresh"]["refresh"])
            rows.append(Measurement(width, entrant.name, refresh, Spread.of(_steps(entrant)), Spread.of(_steps(sgd))))
    return rows


def _steps(entrant: Entrant) -> list[float]:
    """Of plain steps; the last product may be formed where it is added to the weight: the two are not told apart."""
    plain = entrant.phases["plain"]
    return [sum(pair) for pair in zip(plain["application"], plain["update"], strict=True)]


def exponent(widths: Sequence[float], seconds: Sequence[float]) -> float | None:
    """The power of the width that fits best in the least squares of the logarithms; None for a single width, or no time."""
    if len(set(widths)) < 2 or min(seconds) <= 0:
        return None
    return float(np.polyfit(np.log(widths), np.log(seconds), 1)[0])


def exponents(rows: Sequence[Measurement]) -> dict[str, dict[str, float | None]]:
    """By method, of the refresh, of the application and of both together."""
    found: dict[str, dict[str, float | None]] = {}
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        widths = [row.width for row in mine]
        found[method] = {part: exponent(widths, [getattr(row, part).median for row in mine]) for part in PARTS}
    return found


def table(rows: Sequence[Measurement]) -> Table:
    """Seconds by width, one line a method and part, and the fitted exponent."""
    shown = Table(title="One square Linear layer: seconds by width")
    shown.add_column("part")
    shown.add_column("method", no_wrap=True)
    widths = sorted({row.width for row in rows})
    for heading in (*map(str, widths), "exponent"):
        shown.add_column(heading, justify="right", no_wrap=True)
    measured: Mapping[tuple[str, int], Measurement] = {(row.method, row.width): row for row in rows}
    slopes = exponents(rows)
    for part in PARTS:
        for method in slopes:
            here = [measured.get((method, width)) for width in widths]
            slope = slopes[method][part]
            cells = ["-" if row is None else str(getattr(row, part)) for row in here]
            shown.add_row(part, method, *cells, "-" if slope is None else f"{slope:.2f}")
        shown.add_section()
    shown.caption = (
        f"{MEDIANS}; application: step() of a plain step, the pass over the weight that every optimizer makes included; both: "
        "one of each; beyond: both, without SGD's step(); statistics are not counted; exponent: fitted; -: not measured"
    )
    return shown


def as_json(rows: Sequence[Measurement], rank: int) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("scaling", rows, rank=rank, stream=streams.DESCRIPTIONS["signals"], exponents=exponents(rows))

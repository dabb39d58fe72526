"""`rkfac bench scaling`: seconds of refresh and application against the width of one square Linear layer.

Application is all that optimizer.step() does on a plain step. A method that works elsewhere too, in the backward pass or
while it collects statistics (`ELSEWHERE`), is measured by whole steps instead: application is what a plain step takes
longer than SGD's, refresh what a refresh step, which collects statistics as well, takes longer than a plain one.
The exponents are slopes of a line through the measured
points, logarithm against logarithm; what was not measured is not extrapolated. Averages have seen more rows than the
layer is wide before anything is timed: LAPACK is faster on matrices of low rank. A step of any optimizer reads and writes the
whole weight, so that no application grows slower than the square of the width for long; what SGD's own step takes is
measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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
ELSEWHERE = ("B-KFAC (paper)",)
METHODS = (
    EXACT,
    "RS-KFAC (paper)",
    "SRE-KFAC (paper)",
    *ELSEWHERE,
    "SENG (paper)",
    "SENG (paper, exact product)",
)
BASELINE = "SGD"
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
        """One of each, without what SGD's step takes: the least where that takes the most."""
        both, sgd = self.both, self.sgd
        return Spread(both.median - sgd.median, both.low - sgd.high, both.high - sgd.low)


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
        taking_part = (BASELINE, *(name for name in METHODS if name != EXACT or width <= exact_up_to))
        sgd, *others = race(layer, {name: everyone[name] for name in taking_part}, rounds, progress)
        rows += [(_beyond if one.name in ELSEWHERE else _timed)(width, one, sgd) for one in others]
    return rows


def _timed(width: int, entrant: Entrant, sgd: Entrant) -> Measurement:
    """By what the blocks of curvature count."""
    refresh = Spread.of(entrant.phases["refresh"]["refresh"])
    return Measurement(width, entrant.name, refresh, Spread.of(_steps(entrant)), Spread.of(_steps(sgd)))


def _beyond(width: int, entrant: Entrant, sgd: Entrant) -> Measurement:
    """By whole steps, beyond SGD's and beyond plain ones of the same round: what slows the machine down slows down both."""
    plain, refreshing = entrant.by_round("plain"), entrant.by_round("refresh")
    beyond = _above(plain, sgd.by_round("plain"))
    return Measurement(width, entrant.name, Spread.of(_above(refreshing, plain)), Spread.of(beyond), Spread.of([0.0]))


def _above(rounds: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> list[float]:
    """What each step takes longer than the median of the other's in its round."""
    return [step - median(other) for steps, other in zip(rounds, others, strict=True) for step in steps]


def _steps(entrant: Entrant) -> list[float]:
    """Of plain steps; the last product may be formed where it is added to the weight: the two are not told apart."""
    plain = entrant.phases["plain"]
    return [sum(pair) for pair in zip(plain["application"], plain["update"], strict=True)]


def exponent(widths: Sequence[float], seconds: Sequence[float]) -> float | None:
    """The power of the width that fits best in the least squares of the logarithms.

    None for a single width, and where a difference of measurements came out as nothing or less.
    """
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
        "one of each; beyond: both, without SGD's step(); exponent: fitted; -: not measured, or nothing measurable. Statistics "
        f"are not counted, but for {', '.join(ELSEWHERE)}, at work in them and in the backward pass: there application is what "
        "a whole plain step takes beyond SGD's, refresh what a refresh step takes beyond a plain one"
    )
    return shown


def as_json(rows: Sequence[Measurement], rank: int) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("scaling", rows, rank=rank, stream=streams.DESCRIPTIONS["signals"], exponents=exponents(rows))

"""Do refresh and application grow with the cube, the square, the first power of the width, and where do they cross?

A claim over `rkfac bench scaling`, which says what refresh and application are for whom, and what "beyond" leaves out.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

import rkfac
from rkfac_lab.bench import scaling
from rkfac_lab.bench.scaling import Measurement
from rkfac_lab.bench.timing import Spread
from rkfac_lab.claims import drawing
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.text import counted, table

# Which exponent the paper speaks of, what it is, and from where to where it is still that one.
PROMISED: dict[str, tuple[str, str, float, float]] = {
    "K-FAC (paper)": ("both", "3", 2.6, 3.4),
    "RS-KFAC (paper)": ("both", "2", 1.5, 2.4),
    "SRE-KFAC (paper)": ("both", "2", 1.5, 2.4),
    "B-KFAC (paper)": ("beyond", "1", -math.inf, 1.3),
    "SENG (paper)": ("beyond", "1", -math.inf, 1.3),
}
EXPLICIT = inspect.signature(rkfac.SENG).parameters["explicit_up_to"].default
PARTS = {
    "refresh": "One refresh",
    "application": "One application",
    "both": "One of each",
    "beyond": "One of each, beyond SGD's own pass over the weight",
}
SPREAD = "Median seconds, and half the distance between the quartiles of the rounds in per cent of them."


@dataclass(frozen=True)
class Complexity(Claim):
    """Exact K-FAC is measured up to a width of `exact_up_to`; exponents are those of widths from `fitted_from` on."""

    name: ClassVar[str] = "complexity"
    title: ClassVar[str] = "Cubic, quadratic, linear: what the width costs"
    says: ClassVar[str] = (
        "“from O(d³) for K-FAC down to O(d²(r + r_l))”, and “partly closes the gap between K-FAC and SENG (which scales like "
        "O(d))”."
    )

    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    fitted_from: int = 1024
    rank: int = 220
    exact_up_to: int = 4096
    rounds: int = 5

    def small(self) -> Complexity:
        """Narrow layers, where everything but the width decides."""
        return replace(self, widths=(64, 128, 256), fitted_from=64, rank=16, exact_up_to=128, rounds=1)

    def measure(self, desk: Desk) -> dict[str, Any]:
        """Width by width; with as many threads as the desk has."""
        rows: list[dict[str, Any]] = []
        for width in self.widths:
            rows += desk.part(f"width {width}", lambda w=width: self._at(w))  # type: ignore[misc]
        return {"rows": rows}

    def _at(self, width: int) -> list[dict[str, Any]]:
        return [asdict(row) for row in scaling.run((width,), self.rank, self.exact_up_to, self.rounds)]

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        rows = self._fitted(measured(found))
        slopes, rising = scaling.exponents(rows), scaling.exponents(_rising(rows))
        kept = {method: _kept(slopes, method) and _kept(rising, method) and _ends(rows, method) for method in PROMISED}
        told = ", ".join(
            f"{_short(method)} {_exponent(_slope(slopes, method))}"
            + ("" if slopes[method] == rising[method] else f", {_exponent(_slope(rising, method))} while they rise")
            + ("" if _ends(rows, method) else f", {_exponent(_last(rows, method))} in the last doubling")
            + f" ({_limits(method)}{'' if kept[method] else ', not so'})"
            for method in PROMISED
        )
        word = HOLDS if all(kept.values()) else PARTLY if any(kept.values()) else FAILS
        widths = f"{self.fitted_from} to {max(self.widths)} wide"
        measured_on = f"one square Linear layer, {widths}, batch {scaling.BATCH}, rank {self.rank}"
        why = f"Exponents of refresh and application together, of the last two beyond SGD's own pass: {told}."
        return Verdict(word, measured_on, why + _doubts(rows))

    def rule(self, found: Found) -> str:
        """The same for every measurement."""
        return (
            "it holds if every exponent is the promised one within its limits, partly if some are. Where seconds fall while "
            "the width grows, the exponent up to there must be within the limits too, for noise at one end must not decide; "
            "nor may that of the last doubling be above them, for an average of rising exponents is not a law. (The last two "
            "were made after the first figures had been seen.)"
        )

    def _fitted(self, rows: Sequence[Measurement]) -> list[Measurement]:
        """Narrower layers show where methods cross; what a call costs decides there, and not the power of the width."""
        return [row for row in rows if row.width >= self.fitted_from]

    def page(self, found: Found) -> str:
        """Seconds and exponents of each part, then who overtakes whom."""
        rows = measured(found)
        wide = self._fitted(rows)
        parts = [
            f"""
One square Linear layer without a bias, batch {scaling.BATCH}, everybody with the paper's settings, rank {self.rank},
{counted(self.rounds, "round")}. Averages have seen more rows than the layer is wide. A *refresh* makes the decompositions anew,
an *application* is all that `step()` does on a step without statistics, and so includes the pass over the weight that every
optimizer makes: no application grows slower than the square of the width for long. *Beyond* leaves out what SGD's own `step()`
takes. B-KFAC works in the backward pass and while it collects statistics too, and is measured by whole steps: its application is
what a plain step takes longer than SGD's, its refresh what a refresh step, statistics included, takes longer than a plain one.
The statistics of the others are not counted. An exponent is the slope of the line through the widths from {self.fitted_from} on,
logarithm against logarithm; a dash: not measured, or nothing measurable. Narrower layers, which show where methods cross, have
rank {self.rank} too, and B-KFAC's update needs rank and batch together to be less than the width ({self.rank + scaling.BATCH}
here), below which it does as RS-KFAC does; SENG forms the rows of its samples up to {EXPLICIT:,} entries of a weight (a width of
{math.isqrt(EXPLICIT)}), and keeps them as two factors above: its refresh is another one there, and cheaper.
""".strip(),
            f"## The exponents\n\n{self._exponents(wide)}\n\n{_doubts(wide).strip()}".strip(),
            f"![seconds against width]({self.name}-seconds.png)",
            *(f"## {title}\n\n{SPREAD}\n\n{self._seconds(rows, part)}" for part, title in PARTS.items()),
            f"""## Who overtakes whom

Of each pair, the width from which the one that grows more slowly is cheaper than the other on this machine: one refresh and one
application beyond SGD's pass, on straight lines between the measured widths, logarithm against logarithm. How often a method
refreshes is not in it. Two that are at the largest width no further apart than half the distance between the quartiles of each
are not told apart; where one of them changes its form between two widths, no line leads from the one to the other.

{self._crossovers(rows)}""",
        ]
        return "\n\n".join(parts)

    def _exponents(self, rows: Sequence[Measurement]) -> str:
        slopes, rising = scaling.exponents(rows), scaling.exponents(_rising(rows))
        lines = []
        for method, fitted in slopes.items():
            promise = _limits(method) if method in PROMISED else "-"
            promised = method in PROMISED
            kept = _kept(slopes, method) and _kept(rising, method) and _ends(rows, method) if promised else None
            known = {None: "-", True: "yes", False: "no"}[kept]
            octaves = ", ".join(map(_exponent, _octaves([row for row in rows if row.method == method])))
            lines.append([method, *(_exponent(fitted[part]) for part in PARTS), octaves, promise, known])
        return table(["", *PARTS, "beyond, from width to width", "the paper, and the limits here", "so"], lines)

    def _seconds(self, rows: Sequence[Measurement], part: str) -> str:
        known = {(row.method, row.width): getattr(row, part) for row in rows}
        lines = [
            [method, *(_seconds(known.get((method, width))) for width in self.widths)]
            for method in dict.fromkeys(row.method for row in rows)
        ]
        return table(["", *map(str, self.widths)], lines)

    def _crossovers(self, rows: Sequence[Measurement]) -> str:
        known = {(row.method, row.width): row.beyond for row in rows}
        changes = {"B-KFAC (paper)": self.rank + scaling.BATCH, "SENG (paper)": math.isqrt(EXPLICIT)}
        lines = []
        for pair in itertools.combinations(PROMISED, 2):
            shared = [width for width in self.widths if all((method, width) in known for method in pair)]
            first, second = ([known[method, width].median for width in shared] for method in pair)
            slower, where = overtaking(shared, first, second)
            if shared and _alike(*(known[method, shared[-1]] for method in pair)):
                where = f"not told apart at {shared[-1]}"
            elif where.isdigit():
                between = [(low, high) for low, high in itertools.pairwise(shared) if low <= float(where) < high]
                where = next(
                    (
                        f"between {low} and {high}, where {_short(method)} changes its form"
                        for low, high in between
                        for method in pair
                        if low < changes.get(method, 0) < high
                    ),
                    where,
                )
            lines.append([_short(pair[1 - slower]), _short(pair[slower]), where])
        return table(["the one", "is dearer than", "from a width of"], lines, left=2)

    def pictures(self, found: Found) -> dict[str, Figure]:
        """One of each, and the same beyond SGD's pass."""
        rows = measured(found)
        slopes = scaling.exponents(self._fitted(rows))
        figure, panels = drawing.panels(2, across="width of the layer", up="seconds")
        for axes, part in zip(panels, ("both", "beyond"), strict=True):
            for position, (method, fitted) in enumerate(slopes.items()):
                points = [(row.width, getattr(row, part).median) for row in rows if row.method == method]
                points = [(width, seconds) for width, seconds in points if seconds > 0]
                label = f"{method}: {_exponent(fitted[part])}"
                axes.plot(
                    *zip(*points, strict=True) if points else ([], []),
                    **drawing.look(position, marked=True),
                    label=label,
                )
            drawing.logarithmic(axes.xaxis)
            axes.xaxis.set_major_locator(FixedLocator(self.widths))
            axes.xaxis.set_minor_locator(NullLocator())
            drawing.logarithmic(axes.yaxis)
            axes.set_title(PARTS[part])
            axes.legend(frameon=False, fontsize=8, loc="best", title="with the fitted exponent", title_fontsize=8)
        return {"seconds": figure}


def _rising(rows: Sequence[Measurement]) -> list[Measurement]:
    """Of every method the widths up to the one after which its seconds fall."""
    kept: list[Measurement] = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.width)
        falls = [at for at, (a, b) in enumerate(itertools.pairwise(mine), 1) if b.both.median < a.both.median]
        kept += mine[: falls[0]] if falls else mine
    return kept


def _octaves(rows: Sequence[Measurement]) -> list[float | None]:
    """The exponent between each width and the next, beyond SGD's pass; an average of rising ones is not a law."""
    mine = sorted(rows, key=lambda row: row.width)
    return [
        math.log(wide.beyond.median / narrow.beyond.median) / math.log(wide.width / narrow.width)
        if min(wide.beyond.median, narrow.beyond.median) > 0
        else None
        for narrow, wide in itertools.pairwise(mine)
    ]


def _doubts(rows: Sequence[Measurement]) -> str:
    """Whose seconds fell while the width grew, which no method's do: such an exponent is noise in part."""
    told = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = sorted((row for row in rows if row.method == method), key=lambda row: row.width)
        told += [
            f"those of {method} fall from {narrow.width} to {wide.width}"
            for narrow, wide in itertools.pairwise(mine)
            if wide.both.median < narrow.both.median
        ]
    return (
        f" Seconds that fall while the width grows are noise, and so is a part of that exponent: {'; '.join(told)}."
        if told
        else ""
    )


def measured(found: Found) -> list[Measurement]:
    """The benchmark's rows as it knows them."""
    return [
        Measurement(row["width"], row["method"], *(Spread(**row[part]) for part in ("refresh", "application", "sgd")))
        for row in found["rows"]
    ]


def overtaking(widths: Sequence[float], first: Sequence[float], second: Sequence[float]) -> tuple[int, str]:
    """Which of the two grows more slowly (0 or 1), and from which width on it is the cheaper one."""
    if not widths or min(*first, *second) <= 0:
        return 1, "not to be told"
    gaps = [math.log(a / b) for a, b in zip(first, second, strict=True)]  # above zero: the second is cheaper
    slower = int(gaps[-1] >= gaps[0])
    if not slower:
        gaps = [-gap for gap in gaps]
    if gaps[-1] <= 0:
        return slower, f"above {widths[-1]:g}"
    last = max((at for at, gap in enumerate(gaps) if gap <= 0), default=None)
    if last is None:
        return slower, f"below {widths[0]:g}"
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    low, high = math.log(widths[last]), math.log(widths[last + 1])
    return slower, f"{math.exp(low + share * (high - low)):.0f}"


def _alike(one: Spread, other: Spread) -> bool:
    """Whether two medians are no further apart than their quartiles."""
    return abs(one.median - other.median) <= (one.high - one.low) / 2 + (other.high - other.low) / 2


def _short(method: str) -> str:
    return method.removesuffix(" (paper)")


def _slope(slopes: dict[str, dict[str, float | None]], method: str) -> float | None:
    """The exponent that the paper speaks of."""
    return slopes.get(method, {}).get(PROMISED[method][0])


def _kept(slopes: dict[str, dict[str, float | None]], method: str) -> bool:
    """Whether it is within its limits; what could not be measured is not."""
    slope, (_, _, low, high) = _slope(slopes, method), PROMISED[method]
    return slope is not None and low <= slope <= high


def _last(rows: Sequence[Measurement], method: str) -> float | None:
    """The exponent from the last width but one to the last."""
    octaves = _octaves([row for row in rows if row.method == method])
    return octaves[-1] if octaves else None


def _ends(rows: Sequence[Measurement], method: str) -> bool:
    """Whether the last doubling is not steeper than promised; what could not be measured says nothing."""
    last = _last(rows, method)
    return last is None or last <= PROMISED[method][3]


def _limits(method: str) -> str:
    part, power, low, high = PROMISED[method]
    limits = f"{power}: {low:g} to {high:g}" if low > 0 else f"{power}: at most {high:g}"
    return limits + (", beyond SGD" if part == "beyond" else "")


def _exponent(slope: float | None) -> str:
    return "-" if slope is None else f"{slope:.2f}"


def _seconds(spread: Spread | None) -> str:
    """With half the distance of the quartiles; what came out as nothing or less is not measurable."""
    return "-" if spread is None or spread.median <= 0 else str(spread)

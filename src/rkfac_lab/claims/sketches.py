"""Is RSVD more accurate than SREVD when both may multiply by the matrix equally often, and does a training notice?

The published codes give RSVD ten products with the factor and SREVD five, and orthonormalise between them in the one alone.
Here both have the same range finder and the same number of products; what differs is what is read off at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from rkfac_lab.claims import drawing, paper, trained
from rkfac_lab.claims.captured import OLD, YOUNG, Subject, captured
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.sketching import METHODS, PUBLISHED, RSVD, SREVD, FactorErrors, measured
from rkfac_lab.claims.text import around, counted, percent_around, plain, share, table
from rkfac_lab.config import RunConfig

Row = Mapping[str, Any]

GUESSED = 1e-5  # what was taken for the rounding of float32, whatever the rank, before anything was measured
ROUNDING = torch.finfo(torch.float32).eps  # of each of the numbers that a relative error is summed from
NEARLY_ALL = 0.95
# What is compared, where a row has it (in its factors or of its step), and how tables call it.
MEASURES = {"values": "eigenvalues", "lost": "trace lost", "relative": "step"}


@dataclass(frozen=True)
class Sketches(Claim):
    """`subjects`: where factors come from; `products`: how often a sketch multiplies; the others are those of the trainings."""

    name: ClassVar[str] = "rsvd-srevd"
    title: ClassVar[str] = "RSVD is more accurate than SREVD"
    says: ClassVar[str] = (
        "“The projection error is larger for SREVD than for RSVD”, whose own is “virtually zero”; “SRE-KFAC takes more epochs to "
        "reach a target accuracy than RS-KFAC. This is due SRE-KFAC further introducing a projection error …”"
    )

    subjects: tuple[Subject, ...] = (
        Subject("cifar10-vgg-small", 128, 0.3, 2, ("features.10", "features.24", "features.37"), (10, 60, 160)),
        Subject("fashion-autoencoder", 1000, 0.03, 2, ("1", "5", "14"), (10, 60, 160)),
    )
    products: tuple[int, ...] = (2, 5, 10)
    sketch_seeds: int = 2
    oversampling: int = paper.OVERSAMPLING
    workload: str = "cifar10-mini"
    widest: int = 64
    epochs: int = 4
    seeds: int = 3
    target: float = 0.60
    equal: tuple[int, ...] = (5,)  # products of both optimizers
    published: tuple[int, int] = (10, 5)  # of RS-KFAC and SRE-KFAC

    def small(self) -> Sketches:
        """On the embedded digits."""
        return replace(
            self,
            subjects=(Subject("digits-autoencoder", 256, 0.03, 1, ("3", "12"), (3, 20)),),
            products=(2, 5),
            sketch_seeds=1,
            workload="digits-mlp",
            epochs=2,
            seeds=2,
            target=0.85,
            equal=(2, 5),
        )

    @property
    def rank(self) -> int:
        """Of the trainings: the paper's, in proportion."""
        return paper.rank_at(self.widest)

    @property
    def variants(self) -> dict[str, tuple[str, int]]:
        """Every training: which optimizer, and how many products with each factor."""
        wanted = [pair for products in self.equal for pair in (("rs-kfac", products), ("sre-kfac", products))]
        wanted += [("rs-kfac", self.published[0]), ("sre-kfac", self.published[1])]
        return {_title(optimizer, products): (optimizer, products) for optimizer, products in wanted}

    def _run(self, optimizer: str, products: int, seed: int) -> RunConfig:
        given = {"rank": self.rank, "oversampling": self.oversampling, "power_iterations": products - 1}
        return paper.run(self.workload, optimizer, given, epochs=self.epochs, seed=seed)

    def measure(self, desk: Desk) -> dict[str, Any]:
        """First the sketches of captured factors, layer by layer, then the trainings."""
        rows: list[dict[str, Any]] = []
        for subject in (Subject(*values) for values in self.subjects):
            for layer in captured(desk, subject):
                for average, looked_at in ((YOUNG, layer), (OLD, layer.free())):
                    given = (looked_at, subject.rank, self.oversampling, self.products, self.sketch_seeds)
                    title = f"sketches of {layer.workload} layer {layer.layer} step {layer.step} {average}"
                    rows += desk.part(title, partial(_listed, *given))
        wanted = {
            f"{title} seed {seed}": self._run(optimizer, products, seed)
            for seed in range(self.seeds)
            for title, (optimizer, products) in self.variants.items()
        }
        runs = desk.train(wanted)
        rows_trained = [
            {"variant": title, "seed": seed, **trained.outcome(run, self.target)}
            for title in self.variants
            for seed in range(self.seeds)
            if (run := runs.get(f"{title} seed {seed}")) is not None
        ]
        return {"rows": rows, "trained": rows_trained}

    # --- what was found

    def _compared(self, found: Found, measure: str, products: int | None = None) -> list[tuple[float, float]]:
        """Errors of RSVD and of SREVD at the same number of products, one pair a factor or a step."""
        own = {(*_case(row), row["method"]): row for row in found["rows"]}
        counts = self.products if products is None else (products,)
        pairs = [
            (row, own[(*_case(row), SREVD)])
            for row in found["rows"]
            if row["method"] == RSVD and row["products"] in counts
        ]
        if measure == "relative":
            return [
                (one["truncated"]["relative"], other["truncated"]["relative"]) for one, other in pairs if one["factors"]
            ]
        return [
            (errors[measure], other["factors"][side][measure])
            for one, other in pairs
            for side, errors in one["factors"].items()
        ]

    def better(self, found: Found, measure: str, products: int | None = None) -> float | None:
        """The share of all cases in which RSVD has the smaller error; None where no two errors differ by more than rounding."""
        return self._smaller(found, measure, products, ROUNDING * self._largest_rank)

    def _told(
        self, found: Found, measure: str, products: int | None = None, floor: float | None = None
    ) -> list[tuple[float, float]]:
        """Cases whose errors are not both rounding."""
        least = ROUNDING * self._largest_rank if floor is None else floor
        return [pair for pair in self._compared(found, measure, products) if max(pair) > least]

    def _smaller(self, found: Found, measure: str, products: int | None, floor: float) -> float | None:
        told = self._told(found, measure, products, floor)
        return sum(one < other for one, other in told) / len(told) if told else None

    @property
    def _largest_rank(self) -> int:
        return max(Subject(*values).rank for values in self.subjects)

    def _gain(self, found: Found, products: int) -> dict[str, tuple[float, float]]:
        """By how much RS-KFAC is ahead of SRE-KFAC at the same products, and the spread of the seeds, by what is looked at."""
        pair = [self._trained(found, _title(optimizer, products)) for optimizer in ("rs-kfac", "sre-kfac")]
        gains = {}
        for what, sign in (("end", 1), ("steps", -1)):
            ours, theirs = ([row[what] for row in rows] for rows in pair)
            if ours and theirs and None not in ours and None not in theirs:
                ahead = sign * (statistics.fmean(ours) - statistics.fmean(theirs))
                gains[what] = ahead, max(_spread(ours), _spread(theirs))
        return gains

    def _trained(self, found: Found, title: str) -> list[Row]:
        return [row for row in found["trained"] if row["variant"] == title]

    def accurate(self, found: Found) -> bool:
        """Whether RSVD has the smaller error in nearly all cases, of eigenvalues, of the subspace and of the step."""
        return all((self.better(found, measure) or 0.0) >= NEARLY_ALL for measure in MEASURES)

    def shows(self, found: Found) -> bool:
        """Whether RS-KFAC is ahead by more than the seeds' spread at one number of products, and behind by that at none."""
        gains = [gain for products in self.equal for gain in self._gain(found, products).values()]
        return any(ahead > spread for ahead, spread in gains) and not any(-ahead > spread for ahead, spread in gains)

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        accurate = self.accurate(found)
        word = HOLDS if accurate and self.shows(found) else PARTLY if accurate else FAILS
        where = " and ".join(f"{subject[0]} (rank {Subject(*subject).rank})" for subject in self.subjects)
        runs = f"trainings of {self.workload}, rank {self.rank}, {counted(self.epochs, 'epoch')}, {counted(self.seeds, 'seed')}"
        return Verdict(word, f"factors of {where}; {runs}", self._why(found))

    def _why(self, found: Found) -> str:
        shares = ", ".join(
            f"{share(self.better(found, measure), 0)} of {len(self._told(found, measure))} ({name}; of "
            f"{len(self._compared(found, measure))})"
            for measure, name in MEASURES.items()
        )
        told = [
            text
            for products in self.equal
            if (text := self._beside(found, f"{counted(products, 'product')} each", products, products))
        ]
        published = self._beside(
            found, "the published numbers of products, {} and {}".format(*self.published), *self.published
        )
        trainings = (
            "; ".join(told + [published] * bool(published)) or "no pair came to its target and its end in every seed"
        )
        return (
            f"At equal products RSVD has the smaller error in {shares}, where errors are above rounding; in trainings, "
            f"{trainings}."
        )

    def rule(self, found: Found) -> str:
        """Also what another floor would have made of it."""
        return (
            f"it holds if RSVD has the smaller error in {share(NEARLY_ALL, 0)} of the cases above rounding, of each measure, "
            "and a training shows it by more than the seeds' spread; partly if the first alone is so. (What counts as rounding "
            f"was mended when the figures were known: {self._by_guess(found)}.)"
        )

    def _by_guess(self, found: Found) -> str:
        """What the floor that was guessed beforehand says."""
        told = self._told(found, "values", floor=GUESSED)
        smaller = self._smaller(found, "values", None, GUESSED)
        part = share(smaller, 0)
        word = (
            "which does not change the word"
            if (smaller or 0.0) >= NEARLY_ALL
            else f"by which the word would be *{FAILS}*"
        )
        return f"with the {GUESSED:g} that was guessed before it is smaller in {part} of {len(told)} cases of eigenvalues, {word}"

    def _beside(self, found: Found, how: str, ours: int, theirs: int) -> str:
        """Both trainings with their seeds; nothing where one did not come to its target or its end in every seed."""
        pair = [self._trained(found, _title(*one)) for one in (("rs-kfac", ours), ("sre-kfac", theirs))]
        if not all(pair) or any(row[what] is None for rows in pair for row in rows for what in ("steps", "end")):
            return ""
        steps = [around([row["steps"] for row in rows]) for rows in pair]
        ends = " and ".join(percent_around([row["end"] for row in rows]) for rows in pair)
        goal = f"{100 * self.target:g} %"
        return f"with {how}, RS-KFAC needs {steps[0]} steps to {goal} and SRE-KFAC {steps[1]} (they end at {ends})"

    # --- what is read

    def page(self, found: Found) -> str:
        """How often the one is better, how large the errors are, what a training makes of it."""
        ours = [
            [name, *(share(self.better(found, measure, products), 0) for products in self.products)]
            for measure, name in MEASURES.items()
        ]
        workloads = "\n\n".join(
            self._errors(found, Subject(*subject), average) for subject in self.subjects for average in (YOUNG, OLD)
        )
        ends = [
            [
                title,
                str(products),
                self._came(rows),
                percent_around([row["end"] for row in rows if row["end"] is not None]),
            ]
            for title, (_, products) in self.variants.items()
            if (rows := self._trained(found, title))
        ]
        return f"""
Both methods look for a basis Q of the range of a factor X by multiplying Gaussian columns by X, with one orthonormalisation after
every product, and multiply once more for Z = X Q. SREVD takes the eigenpairs of Q^T Z and stays in the span of Q. RSVD takes
singular pairs of Z; its V side lies in the span of X Q, one multiplication further, its U side in that of Q. Nyström makes
Z (Q^T Z)^-1 Z^T of the same Z. The number of products with X, which is what a sketch costs, is the same for all of them here.

As published the two did not have the same: RSVD had 10 products (and, with PyTorch of 2022, the U side), SREVD had 5 without an
orthonormalisation between them. Both are rows of their own below.

Factors and gradients were kept at several steps of a training by RS-KFAC with the paper's settings, but for statistics every
other step, and on the autoencoder a tenth of the rate, for at the paper's the loss goes up first. The averages start from the
identity, which adds a flat floor to their spectra that a sketch finds no subspace in, until it is forgotten: the paper's Figure 1
has its output factors at an equilibrium after some 5100 steps. Every factor is therefore looked at twice: as it is, and with the
identity taken out, as it would be later in a training. Sketches are made in float32, oversampled by
{self.oversampling}, and compared with float64; numbers are means over {counted(self.sketch_seeds, "sketch seed")}.

## How often RSVD (V side) is nearer than SREVD

{table(["smaller error of", *(counted(products, "product") for products in self.products)], ours)}

One case is a factor (eigenvalues, trace) or a layer's step at one time. Cases in which both errors are below
{ROUNDING * self._largest_rank:.1e}, as many roundings of float32 as there are eigenvalues, are left out; a dash: all of them.
The largest angle between
the subspaces is shown and not judged: it is near one for both wherever the eigenvalues at the cut are close to each other.

## How large the errors are

Medians over layers and times. *Eigenvalues*: sum of the errors of those kept, in units of their sum. *Trace lost*: how much less
of the trace the basis holds than the best one of its rank does. *Angle*: sine of the largest angle between the two subspaces
(near 1 wherever the eigenvalues at the cut are close to each other, and then of no consequence). *Step*: relative error and
cosine of (G + l)^-1 J (A + l)^-1 at a damping of a tenth of the largest eigenvalue, against the exact factors truncated at the
same rank (the paper's projection error) and against the exact factors with all modes.

{workloads}

![errors against products]({self.name}-errors.png)

## What a training makes of it

{self.workload}, {counted(self.epochs, "epoch")} at the paper's settings, rank {self.rank}, {counted(self.seeds, "seed")}.
The optimizers here always orthonormalise, and take the V side.

{table(["", "products", f"steps to {100 * self.target:g} %", "accuracy at the end"], ends)}

A dash: not in every seed.

![training]({self.name}-training.png)
"""

    def _errors(self, found: Found, subject: Subject, average: str) -> str:
        here = [row for row in found["rows"] if row["workload"] == subject.workload and row["average"] == average]
        lines = []
        for method, products in dict.fromkeys((row["method"], row["products"]) for row in here):
            own: dict[str, Any] = {"method": method, "products": products}
            factors = [_median(here, partial(_of_factors, name), **own) for name in FactorErrors._fields]
            steps = [
                _median(here, partial(_of_step, truth, what), **own)
                for truth in ("truncated", "exact")
                for what in ("relative", "cosine")
            ]
            shown = [plain(value, digits) for value, digits in zip(steps, (2, 4, 2, 4), strict=True)]
            lines.append([method, str(products), *(plain(value, 2) for value in factors), *shown])
        lines.sort(key=lambda line: int(line[1]))
        header = ["", "products", "eigenvalues", "trace lost", "angle"]
        header += ["step against truncated", "cosine", "step against exact", "cosine"]
        sizes = f"Rank {subject.rank}, lr {subject.lr:g}, layers {', '.join(subject.layers)} after "
        sizes += f"{', '.join(map(str, subject.steps))} steps."
        return f"### {subject.workload}, {average}\n\n{sizes}\n\n{table(header, lines)}"

    def _came(self, rows: Sequence[Row]) -> str:
        steps = [row["steps"] for row in rows]
        return "-" if None in steps else around(steps)

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Errors against products by workload, and accuracy against steps."""
        return {"errors": self._error_picture(found), "training": self._training_picture(found)}

    def _error_picture(self, found: Found) -> Figure:
        cases = list(dict.fromkeys((row["workload"], row["average"]) for row in found["rows"]))
        up = "error of the step (against truncated)"
        figure, frames = drawing.panels(len(cases), across="products with the factor", up=up)
        for axes, (workload, average) in zip(frames, cases, strict=True):
            here = [row for row in found["rows"] if row["workload"] == workload and row["average"] == average]
            for position, method in enumerate((*METHODS, *PUBLISHED)):
                own = [row for row in here if row["method"] == method]
                counts = sorted({row["products"] for row in own})
                heights = [_median(own, _relative, products=products) for products in counts]
                points = [(x, max(y, GUESSED / 10)) for x, y in zip(counts, heights, strict=True) if y is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), **drawing.look(position, marked=True), label=method)
            drawing.logarithmic(axes.yaxis)
            axes.set_xticks(sorted({row["products"] for row in here}))
            axes.set_title(f"{workload}, {average}")
        drawing.names_below(figure, frames[-1])
        return figure

    def _training_picture(self, found: Found) -> Figure:
        figure, (axes,) = drawing.panels(1, across="step", up="test accuracy")
        for position, title in enumerate(self.variants):
            axes.plot(*trained.mean_curve(self._trained(found, title)), **drawing.look(position), label=title)
        drawing.note(axes, [(self.target, f"{100 * self.target:g} %")])
        axes.set_title(f"{self.workload}, rank {self.rank}: mean over {counted(self.seeds, 'seed')}")
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        return figure


def _listed(*given: Any) -> list[dict[str, Any]]:
    return list(measured(*given))


def _title(optimizer: str, products: int) -> str:
    return f"{optimizer.upper()}, {counted(products, 'product')}"


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("workload", "layer", "step", "average", "products"))


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _of_factors(name: str, row: Row) -> list[float]:
    return [errors[name] for errors in row["factors"].values()]


def _of_step(truth: str, what: str, row: Row) -> list[float]:
    """A layer without a factor wide enough for a sketch says nothing about sketches."""
    return [row[truth][what]] if row["factors"] else []


def _relative(row: Row) -> list[float]:
    return _of_step("truncated", "relative", row)


def _median(rows: Sequence[Row], read: Callable[[Row], list[float]], **own: Any) -> float | None:
    """Of what is read off those rows that have these values."""
    found = [value for row in rows if all(row[key] == wanted for key, wanted in own.items()) for value in read(row)]
    return statistics.median(found) if found else None

"""Trainings with the paper's settings that differ in how many modes are kept, what stands for the others, and the damping."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rkfac_lab.claims import paper
from rkfac_lab.claims.captured import OLD, YOUNG, Subject
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.truncation import TAILS
from rkfac_lab.config import RunConfig
from rkfac_lab.record import Run

EXACT, AUTO = "exact", "auto"  # in the place of a rank
DAMPING, SMALLER = 0.1, 0.01  # of the largest eigenvalue: the paper's, and one that washes less away
START = {YOUNG: "paper", OLD: "unbiased"}
SPREAD = 0.02  # of a loss: as good as the same

Row = Mapping[str, Any]


class Variant(NamedTuple):
    """`rank` is a share of the proportional one, or EXACT, or AUTO; without a tail where all modes are kept."""

    rank: float | str
    tail: str | None
    average: str = YOUNG
    damping: float = DAMPING

    def title(self, subject: Subject) -> str:
        """As a table names it."""
        named = "all modes" if self.rank == EXACT else f"rank {self._rank(subject)}, {self.tail} tail"
        return f"{named}, {self.average}, damping {self.damping:g}"

    def run(self, subject: Subject, steps: int, seed: int) -> RunConfig:
        """The paper's settings at the subject's learning rate; the training loss is a mean over the last sixth."""
        arguments: dict[str, Any] = {"lr": subject.lr, "factor_start": START[self.average], "damping": self.damping}
        if self.rank != EXACT:
            arguments |= {"rank": self._rank(subject), "tail": self.tail}
        length = {"epochs": steps, "max_steps": steps, "evaluate_every": steps, "evaluate_steps": max(1, steps // 6)}
        name = "k-fac" if self.rank == EXACT else "rs-kfac"
        return paper.run(subject.workload, name, arguments, seed=seed, **length)

    def _rank(self, subject: Subject) -> int | str:
        return self.rank if isinstance(self.rank, str) else max(1, round(self.rank * subject.rank))


def variants(fractions: Sequence[float]) -> list[Variant]:
    """All modes first, in each group that is compared with them."""
    ranked = [Variant(fraction, tail) for fraction in fractions for tail in TAILS]
    groups = [Variant(EXACT, None), *ranked, Variant(AUTO, "zero")]
    for average, damping in ((OLD, DAMPING), (YOUNG, SMALLER)):
        groups += [Variant(EXACT, None, average, damping)]
        groups += [Variant(1.0, tail, average, damping) for tail in TAILS]
    return groups


def trained(
    desk: Desk, subjects: Sequence[Subject], wanted: Sequence[Variant], steps: int, seeds: int
) -> list[dict[str, Any]]:
    """What every training came to; one that failed is no row, one that diverged has no loss."""
    cases = {
        f"{subject.workload} {variant.title(subject)} seed {seed}": (subject, variant, seed)
        for seed in range(seeds)
        for subject in subjects
        for variant in wanted
    }
    runs = desk.train({name: variant.run(subject, steps, seed) for name, (subject, variant, seed) in cases.items()})
    return [
        {"workload": subject.workload, "variant": variant.title(subject), "seed": seed, **_outcome(runs[name])}
        for name, (subject, variant, seed) in cases.items()
        if name in runs
    ]


def _outcome(run: Run) -> dict[str, Any]:
    ended = run.summary["status"] == "finished"
    return {
        "loss": run.epochs[-1]["train_loss"] if ended else None,
        "test_loss": run.epochs[-1]["test_loss"] if ended else None,
    }


def losses(rows: Sequence[Row], subject: Subject, variant: Variant, what: str = "loss") -> list[float]:
    """Seed by seed; what diverged has none."""
    title = variant.title(subject)
    mine = (row for row in rows if (row["workload"], row["variant"]) == (subject.workload, title))
    return [row[what] for row in mine if row[what] is not None]


class Excess(NamedTuple):
    """How much larger a loss is than that of all modes, relatively, and how much of it may be chance."""

    share: float
    chance: float


def excess(rows: Sequence[Row], subject: Subject, variant: Variant) -> Excess | None:
    """Against all modes with the same averages and the same damping; nothing where a seed is missing."""
    exact = losses(rows, subject, Variant(EXACT, None, variant.average, variant.damping))
    ours = losses(rows, subject, variant)
    if not exact or len(ours) < len(exact):
        return None
    mean = statistics.fmean(exact)
    spread = max(statistics.stdev(values) if len(values) > 1 else 0.0 for values in (exact, ours))
    return Excess((statistics.fmean(ours) - mean) / mean, max(SPREAD, spread / mean))


def judged(rows: Sequence[Row], subjects: Sequence[Subject]) -> Iterator[tuple[Subject, str, Excess | None]]:
    """What the claim is about: the proportional rank at the paper's damping with the paper's averages, either tail."""
    for subject in subjects:
        for tail in TAILS:
            yield subject, tail, excess(rows, subject, Variant(1.0, tail))

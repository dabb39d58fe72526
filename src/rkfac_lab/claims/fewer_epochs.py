"""Does RS-KFAC need fewer epochs than K-FAC, and if so, what of the two makes the difference?

The published comparison changes several things at once: the sketch, the identity that it drops from the modes it does not
keep, and the damping rule. Here each is changed alone, at one learning rate for everybody and at each one's own best. The four
on the way from the one published method to the other have more seeds than the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure

from rkfac_lab.claims import drawing, paper, rates, trained
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.text import counted, percent_around, table
from rkfac_lab.config import RunConfig

PUBLISHED, RANDOMIZED = "K-FAC, as published", "RS-KFAC, as published"
KEPT, LIKE = "RS-KFAC, identity kept", "K-FAC, factored"
UNBIASED = "RS-KFAC, unbiased"
PRODUCT_UNBIASED, FACTORED_UNBIASED = "K-FAC, unbiased", "K-FAC, factored, unbiased"
PRODUCT_DROPPED, DROPPED = "K-FAC, identity dropped", "K-FAC, factored, identity dropped"
# What each differs in from the paper's settings, and in words: rule, start, what stands for the modes that are not kept.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, str, str]]] = {
    PUBLISHED: ("k-fac", {"damping_rule": "product"}, ("product", "identity", "all kept")),
    LIKE: ("k-fac", {}, ("factored", "identity", "all kept")),
    DROPPED: ("k-fac", {"factor_start": "dropped"}, ("factored", "identity, left out", "all kept")),
    PRODUCT_DROPPED: (
        "k-fac",
        {"damping_rule": "product", "factor_start": "dropped"},
        ("product", "identity, left out", "all kept"),
    ),
    PRODUCT_UNBIASED: (
        "k-fac",
        {"damping_rule": "product", "factor_start": "unbiased"},
        ("product", "unbiased", "all kept"),
    ),
    FACTORED_UNBIASED: ("k-fac", {"factor_start": "unbiased"}, ("factored", "unbiased", "all kept")),
    RANDOMIZED: ("rs-kfac", {}, ("factored", "identity", "nothing: zero, without the identity")),
    KEPT: ("rs-kfac", {"factor_start": "identity"}, ("factored", "identity", "the identity's remnant")),
    "RS-KFAC, trace tail": ("rs-kfac", {"tail": "trace"}, ("factored", "identity", "their mean")),
    UNBIASED: ("rs-kfac", {"factor_start": "unbiased"}, ("factored", "unbiased", "nothing: zero")),
    "RS-KFAC, unbiased, trace tail": (
        "rs-kfac",
        {"factor_start": "unbiased", "tail": "trace"},
        ("factored", "unbiased", "their mean"),
    ),
}
# From the one published method to the other, one difference at a time.
WAY = (PUBLISHED, LIKE, KEPT, RANDOMIZED)
PARTS = (
    "the damping rule (factored instead of product)",
    "the sketch itself, with the identity kept",
    "dropping the identity from the modes that are not kept",
)


class Sooner(NamedTuple):
    """By how many steps one comes to the target sooner than another, in the mean, and the standard error of that."""

    steps: float
    error: float

    @property
    def surely(self) -> bool:
        """By more than two standard errors; one seed has none."""
        return self.steps > 2 * self.error

    def __str__(self) -> str:
        """As 31 ± 12."""
        return f"{self.steps:.0f} ± {self.error:.0f}"


@dataclass(frozen=True)
class FewerEpochs(Claim):
    """`widest` is the number of channels of the widest layer; `target` the accuracy whose steps are counted.

    `seeds` of the way from one published method to the other, `others` of the rest. So many `finalists` among the rates are
    tried again with all epochs, for the rate that is ahead early need not be the one that ends best.
    """

    name: ClassVar[str] = "fewer-epochs"
    title: ClassVar[str] = "RS-KFAC needs fewer epochs than K-FAC"
    says: ClassVar[str] = (
        "“Surprisingly, we see that the number of epochs to a target accuracy (at least for 92 %) is also smaller for RS-KFAC "
        "and SRE-KFAC than for K-FAC.” (Section 5)"
    )

    workload: str = "cifar10-mini"
    widest: int = 64
    epochs: int = 4
    tuning_epochs: int = 1
    rates: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    finalists: int = 3
    common: float = 0.3
    seeds: int = 4
    others: int = 2
    target: float = 0.60

    def small(self) -> FewerEpochs:
        """On the embedded digits."""
        return replace(
            self,
            workload="digits-mlp",
            widest=1024,
            epochs=2,
            tuning_epochs=1,
            rates=(0.1, 0.3),
            finalists=1,
            seeds=1,
            others=1,
            target=0.9,
        )

    @property
    def rank(self) -> int:
        """The paper's, in proportion."""
        return paper.rank_at(self.widest)

    def _run(self, variant: str, lr: float, seed: int, **keys: Any) -> RunConfig:
        optimizer, arguments, _ = VARIANTS[variant]
        given = {**arguments, "lr": lr, "rank": self.rank}
        return paper.run(self.workload, optimizer, given, seed=seed, **{"epochs": self.epochs, **keys})

    def measure(self, desk: Desk) -> dict[str, Any]:
        """First the rates, on validation data; then everybody at the common rate, and at the own one where it is another."""

        def trying(epochs: int) -> Callable[[str, float], RunConfig]:
            return lambda variant, lr: self._run(variant, lr, rates.SEED, epochs=epochs, validation_share=rates.SHARE)

        trials, best = rates.choose(desk, dict.fromkeys(VARIANTS, self.rates), trying(self.tuning_epochs))
        finals: dict[str, dict[str, float | None]] = {}
        if self.tuning_epochs < self.epochs and self.finalists > 1:
            ahead = {variant: rates.leading(values, self.finalists) for variant, values in trials.items()}
            finals, best = rates.choose(desk, ahead, trying(self.epochs), "final")
        wanted = [
            (variant, lr, seed)
            for seed in range(max(self.seeds, self.others))
            for variant in VARIANTS
            for lr in dict.fromkeys((self.common, best[variant]))
            if seed < (self.seeds if variant in WAY else self.others)
        ]
        runs = desk.train({f"{v} lr {lr:g} seed {seed}": self._run(v, lr, seed) for v, lr, seed in wanted})
        rows = [
            {"variant": variant, "lr": lr, "seed": seed, **trained.outcome(run, self.target)}
            for variant, lr, seed in wanted
            if (run := runs.get(f"{variant} lr {lr:g} seed {seed}")) is not None
        ]
        return {"trials": trials, "finals": finals, "best": best, "rows": rows}

    def _ends(self, found: Found, variant: str, lr: float) -> list[float]:
        """Accuracies at the end, seed by seed; what diverged has none."""
        return [row["end"] for row in self._rows(found, variant, lr) if row["end"] is not None]

    def _rows(self, found: Found, variant: str, lr: float) -> list[Mapping[str, Any]]:
        return [row for row in found["rows"] if row["variant"] == variant and row["lr"] == lr]

    def _steps(self, found: Found, variant: str, lr: float) -> list[int]:
        """Steps to the target, seed by seed; none unless every seed came there."""
        steps = [row["steps"] for row in self._rows(found, variant, lr)]
        return [] if None in steps else steps

    def _rates(self, found: Found) -> dict[str, Callable[[str], float]]:
        """At which rate a variant is looked at."""
        return {f"at lr {self.common:g}": lambda _: self.common, "at own rates": lambda v: found["best"][v]}

    def _sooner(self, found: Found, late: str, early: str, rate: Callable[[str], float]) -> Sooner | None:
        """None where one of the two did not come there in every seed."""
        one, other = (self._steps(found, variant, rate(variant)) for variant in (late, early))
        if not one or not other:
            return None
        error = sum(statistics.variance(steps) / len(steps) for steps in (one, other) if len(steps) > 1)
        return Sooner(statistics.fmean(one) - statistics.fmean(other), error**0.5)

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        measured = f"{self.workload}, {self.epochs} epochs, rank {self.rank}, {counted(self.seeds, 'seed')}"
        passed = 0
        for rate in self._rates(found).values():
            sooner = self._sooner(found, PUBLISHED, RANDOMIZED, rate)
            alone = bool(self._steps(found, RANDOMIZED, rate(RANDOMIZED)))  # K-FAC did not come there in every seed
            passed += sooner.surely if sooner else alone
        return Verdict({2: HOLDS, 1: PARTLY, 0: FAILS}[passed], measured, self._why(found))

    def _why(self, found: Found) -> str:
        """How much sooner, and which of the differences it is, in one sentence."""
        told = []
        for where, rate in self._rates(found).items():
            sooner = self._sooner(found, PUBLISHED, RANDOMIZED, rate)
            if sooner is None:
                told.append(f"{where} one of the two does not come there in every seed")
                continue
            parts = self._parts(found, rate)
            sure = [f"{name}, {part}" for name, part in parts.items() if part and part.surely]
            told.append(
                f"{where} {sooner} steps sooner (more than two standard errors: "
                f"{' and '.join(sure) or 'none of the differences'})"
            )
        ends = " and ".join(
            percent_around(self._ends(found, variant, found["best"][variant])) for variant in (RANDOMIZED, PUBLISHED)
        )
        return (
            f"RS-KFAC comes to {100 * self.target:g} % {'; '.join(told)}, ± a standard error; a negative number means later. "
            f"At own rates the two end at {ends}.{self._moved(found)}"
        )

    def _moved(self, found: Found) -> str:
        """How much of what own rates show comes from K-FAC's being another one than the common."""
        own = found["best"]
        if own[RANDOMIZED] != self.common or own[PUBLISHED] == self.common:
            return ""
        here, there = (self._steps(found, PUBLISHED, lr) for lr in (self.common, own[PUBLISHED]))
        if not here or not there:
            return ""
        return (
            f" RS-KFAC's own rate is the common one; K-FAC's, {own[PUBLISHED]:g}, was chosen because it ends highest, and is at "
            f"{100 * self.target:g} % after {statistics.fmean(there):.0f} steps where {self.common:g} is after "
            f"{statistics.fmean(here):.0f}: so much of the difference at own rates is the choice of the rate."
        )

    def rule(self, found: Found) -> str:
        """Also what the one before it would have said."""
        pairs = [self._sooner(found, PUBLISHED, RANDOMIZED, rate) for rate in self._rates(found).values()]
        before = all(pair is not None and pair.steps > 0 for pair in pairs)
        return (
            "it holds if RS-KFAC as published is there sooner than K-FAC as published by more than two standard errors, at the "
            "common rate and at own rates, partly if at one of the two. (Made stricter after the first figures, from two seeds: "
            f"before, sooner was enough, and by that rule it would {'hold' if before else 'not hold in full'}.)"
        )

    def _parts(self, found: Found, rate: Callable[[str], float]) -> dict[str, Sooner | None]:
        """What each of the differences that the published comparison mixes is worth, in steps."""
        steps = pairwise(WAY)
        return {name: self._sooner(found, *two, rate) for name, two in zip(PARTS, steps, strict=True)}

    def _made_of(self, found: Found) -> str:
        """The same in a table, with accuracies at the end beside it, and what leaving the identity out is worth."""
        pairs = [*zip(PARTS, pairwise(WAY), strict=True)]
        pairs.append(("all three together", (PUBLISHED, RANDOMIZED)))
        pairs.append(("leaving the identity out altogether, K-FAC, product rule", (PUBLISHED, PRODUCT_DROPPED)))
        pairs.append(("the same, factored rule", (LIKE, DROPPED)))
        pairs.append(("averages without a start, K-FAC, product rule", (PUBLISHED, PRODUCT_UNBIASED)))
        pairs.append(("the same, factored rule", (LIKE, FACTORED_UNBIASED)))
        pairs.append(("the same, RS-KFAC", (RANDOMIZED, UNBIASED)))
        pairs.append(("the sketch with a zero tail, of averages without a start", (FACTORED_UNBIASED, UNBIASED)))
        lines = []
        for name, (late, early) in pairs:
            cells = []
            for rate in self._rates(found).values():
                sooner = self._sooner(found, late, early, rate)
                cells += ["-" if sooner is None else str(sooner), self._points(found, late, early, rate)]
            lines.append([name, *cells])
        header = [""]
        for where in self._rates(found):
            header += [f"{where}: steps saved", "points at the end"]
        return f"{table(header, lines)}\n\n{self._longer(found)}"

    def _points(self, found: Found, late: str, early: str, rate: Callable[[str], float]) -> str:
        first, second = (self._ends(found, variant, rate(variant)) for variant in (early, late))
        if not first or not second:
            return "-"
        return f"{100 * (statistics.fmean(first) - statistics.fmean(second)):+.1f}"

    def _longer(self, found: Found) -> str:
        """Whether dropping the identity makes steps longer: it should show where rates are small, and in the best rate."""
        low = f"{min(self.rates):g}"
        dropped, kept = (found["trials"][variant][low] for variant in (RANDOMIZED, KEPT))
        if dropped is None or kept is None:
            return ""
        rates_of = [found["best"][variant] for variant in (RANDOMIZED, KEPT)]
        longer = dropped > kept and rates_of[0] < rates_of[1]
        word = (
            "That agrees with longer steps, for which a larger rate makes up; lengths themselves were not measured."
            if longer
            else "It does not show here."
        )
        return (
            f"*Does a sketch that drops the identity take longer steps?* At the smallest rate tried, {low}, it is at "
            f"{100 * dropped:.1f} % on validation data where the same sketch that keeps the identity is at {100 * kept:.1f} %, "
            f"and its best rate is {rates_of[0]:g} where the other's is {rates_of[1]:g}. {word}"
        )

    def page(self, found: Found) -> str:
        """Two tables and what each step from the one method to the other brings."""
        header = [
            "",
            "damping rule",
            "averages start from",
            "modes not kept are replaced by",
            "seeds",
            f"at {self.common:g}: end",
            f"steps to {100 * self.target:g} %",
            "own rate",
            "end",
            "steps",
        ]
        lines = []
        for variant, (_, _, words) in VARIANTS.items():
            own = found["best"][variant]
            at_one, at_own = (
                [percent_around(self._ends(found, variant, rate)), self._came(found, variant, rate)]
                for rate in (self.common, own)
            )
            seeds = str(len(self._rows(found, variant, self.common)))
            lines.append([variant, *words, seeds, *at_one, f"{own:g}", *at_own])
        tried = [[variant, *self._tried(found, variant)] for variant in found["trials"]]
        return f"""
K-FAC as published and RS-KFAC as published differ in three things at once: the damping rule (the published code has the product
rule for K-FAC and the factored one for RS-KFAC), the sketch, and what becomes of the identity that the averages start from: exact
K-FAC keeps its remnant on every mode as extra damping, a sketch with a zero tail drops it from all modes that it does not keep.
Here one thing is changed at a time. All have the paper's settings otherwise (damping a tenth of the largest eigenvalue, no
momentum, statistics every 10 steps, inverses every 50, clip 0.07), a learning rate that goes up over a twentieth of the steps and
then down to zero, and rank {self.rank}: the paper's 220 in proportion to the widest layer ({self.widest} channels, not 512).

## What each one does

{table(header, lines, left=4)}

Accuracies on test data after {counted(self.epochs, "epoch")}, and steps, mean and standard deviation over the seeds. A dash: not
in every seed. Networks are measured every 28 steps. A rate is an own one because it ends best on validation data, which need not
be the one that comes to {100 * self.target:g} % first.

## Which difference explains it

Steps to {100 * self.target:g} % that each difference saves, with the standard error of the difference of two means, and what it
adds to the accuracy at the end. What is less than twice its error is not told from nothing, and of so many
differences of two to four seeds one or the other passes that by chance.

{self._made_of(found)}

![curves at the common rate]({self.name}-curves.png)

## How the rates were chosen

On a tenth of the training data kept apart, after {counted(self.tuning_epochs, "epoch")} with the whole schedule, one seed that no
reported run has; behind the arrow, of the {self.finalists} best, with all {counted(self.epochs, "epoch")}, which decided:

{table(["", *(f"{lr:g}" for lr in self.rates)], tried)}

{rates.at_edge(found["trials"], found["best"])}
"""

    def _tried(self, found: Found, variant: str) -> list[str]:
        finals = found["finals"].get(variant, {})
        cells = []
        for lr, value in found["trials"][variant].items():
            last = f" → {100 * finals[lr]:.1f}" if finals.get(lr) is not None else ""
            cells.append("diverged" if value is None else f"{100 * value:.1f}{last} %")
        return cells

    def _came(self, found: Found, variant: str, lr: float) -> str:
        steps = self._steps(found, variant, lr)
        if not steps:
            return "-"
        mean = f"{statistics.fmean(steps):.0f}"
        return f"{mean} ± {statistics.stdev(steps):.0f}" if len(steps) > 1 else mean

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Accuracy against steps at the common rate, exact and sketched beside each other."""
        figure, panels = drawing.panels(2, across="step", up="test accuracy", same_height=True)
        for axes, optimizer, title in zip(panels, ("k-fac", "rs-kfac"), ("exact K-FAC", "RS-KFAC"), strict=True):
            for position, variant in enumerate(v for v, (name, _, _) in VARIANTS.items() if name == optimizer):
                rows = self._rows(found, variant, self.common)
                label = f"{variant} ({counted(len(rows), 'seed')})"
                axes.plot(*trained.mean_curve(rows), **drawing.look(position), label=label)
            axes.set_title(f"{title}, lr {self.common:g}: means")
            axes.legend(frameon=False, fontsize=9, loc="lower right")
        return {"curves": figure}

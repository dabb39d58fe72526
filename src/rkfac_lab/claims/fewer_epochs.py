"""Does RS-KFAC need fewer epochs than K-FAC, and if so, what of the two makes the difference?

The published comparison changes several things at once: the sketch, the identity that it drops from the modes it does not
keep, and the damping rule. Here each is changed alone, at one learning rate for everybody and at each one's own best.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from rkfac_lab.claims import drawing, paper, rates, trained
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.text import counted, percent_around, table
from rkfac_lab.config import RunConfig

PUBLISHED, RANDOMIZED = "K-FAC, as published", "RS-KFAC, as published"
KEPT, LIKE = "RS-KFAC, identity kept", "K-FAC, factored"
UNBIASED = "RS-KFAC, unbiased"
PRODUCT_UNBIASED, FACTORED_UNBIASED, DROPPED = (
    "K-FAC, unbiased",
    "K-FAC, factored, unbiased",
    "K-FAC, factored, identity dropped",
)
# What each differs in from the paper's settings, and in words: rule, start, what stands for the modes that are not kept.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, str, str]]] = {
    PUBLISHED: ("k-fac", {"damping_rule": "product"}, ("product", "identity", "all kept")),
    LIKE: ("k-fac", {}, ("factored", "identity", "all kept")),
    DROPPED: ("k-fac", {"factor_start": "dropped"}, ("factored", "identity, left out", "all kept")),
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


@dataclass(frozen=True)
class FewerEpochs(Claim):
    """`widest` is the number of channels of the widest layer; `target` the accuracy whose steps are counted."""

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
    common: float = 0.3
    seeds: int = 2
    target: float = 0.60

    def small(self) -> FewerEpochs:
        """On the embedded digits."""
        return replace(
            self, workload="digits-mlp", widest=1024, epochs=2, tuning_epochs=1, rates=(0.1, 0.3), seeds=1, target=0.9
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

        def trial(variant: str, lr: float) -> RunConfig:
            return self._run(variant, lr, rates.SEED, epochs=self.tuning_epochs, validation_share=rates.SHARE)

        trials, best = rates.choose(desk, dict.fromkeys(VARIANTS, self.rates), trial)
        wanted = [
            (variant, lr, seed)
            for seed in range(self.seeds)
            for variant in VARIANTS
            for lr in dict.fromkeys((self.common, best[variant]))
        ]
        runs = desk.train({f"{v} lr {lr:g} seed {seed}": self._run(v, lr, seed) for v, lr, seed in wanted})
        rows = [
            {"variant": variant, "lr": lr, "seed": seed, **trained.outcome(run, self.target)}
            for variant, lr, seed in wanted
            if (run := runs.get(f"{variant} lr {lr:g} seed {seed}")) is not None
        ]
        return {"trials": trials, "best": best, "rows": rows}

    def _ends(self, found: Found, variant: str, lr: float) -> list[float]:
        """Accuracies at the end, seed by seed; what diverged has none."""
        return [row["end"] for row in self._rows(found, variant, lr) if row["end"] is not None]

    def _rows(self, found: Found, variant: str, lr: float) -> list[Mapping[str, Any]]:
        return [row for row in found["rows"] if row["variant"] == variant and row["lr"] == lr]

    def _steps(self, found: Found, variant: str, lr: float) -> float | None:
        """Mean steps to the target; None unless every seed came there."""
        steps = [row["steps"] for row in self._rows(found, variant, lr)]
        return None if not steps or None in steps else statistics.fmean(steps)

    def verdict(self, found: Found) -> Verdict:
        """Holds: sooner at the common rate and at own rates; partly: at one of the two."""
        measured = f"{self.workload}, {self.epochs} epochs, rank {self.rank}, {counted(self.seeds, 'seed')}"
        sooner = {}
        for which, rate in (("one", lambda _: self.common), ("own", lambda v: found["best"][v])):
            exact, sketched = (self._steps(found, v, rate(v)) for v in (PUBLISHED, RANDOMIZED))
            sooner[which] = None if sketched is None else exact is None or sketched < exact
        word = {2: HOLDS, 1: PARTLY, 0: FAILS}[sum(bool(value) for value in sooner.values())]
        return Verdict(word, measured, self._why(found))

    def _why(self, found: Found) -> str:
        """Steps of the two as published, and of the same two without the identity."""

        def both(exact: str, sketched: str) -> str:
            own = " and ".join(self._came(found, v, found["best"][v]) for v in (exact, sketched))
            return f"{' and '.join(self._came(found, v, self.common) for v in (exact, sketched))} (own rates: {own})"

        return (
            f"Steps to {100 * self.target:g} % of K-FAC and RS-KFAC as published at lr {self.common:g}: "
            f"{both(PUBLISHED, RANDOMIZED)}. With averages that are free of the identity and one damping rule: "
            f"{both(FACTORED_UNBIASED, UNBIASED)}."
        )

    def _made_of(self, found: Found) -> str:
        """What each of the differences that the published comparison mixes is worth, at the common rate."""

        def gain(better: str, worse: str) -> float:
            first, second = (self._ends(found, variant, self.common) for variant in (better, worse))
            return 100 * (statistics.fmean(first) - statistics.fmean(second)) if first and second else 0.0

        parts = {
            "the damping rule (factored instead of product)": gain(LIKE, PUBLISHED),
            "the sketch itself, with the identity kept": gain(KEPT, LIKE),
            "dropping the identity from the modes that are not kept": gain(RANDOMIZED, KEPT),
        }
        told = "; ".join(f"{name} {points:+.1f} points" for name, points in parts.items())
        return (
            f"At lr {self.common:g} RS-KFAC as published ends {gain(RANDOMIZED, PUBLISHED):+.1f} points from K-FAC as published, "
            f"made up of: {told}.\nLeaving the identity out altogether is worth {gain(FACTORED_UNBIASED, LIKE):+.1f} points to "
            f"exact K-FAC and {gain(UNBIASED, RANDOMIZED):+.1f} to RS-KFAC.\n\n{self._in_steps(found)}\n\n{self._longer(found)}"
        )

    def _in_steps(self, found: Found) -> str:
        """The same way from the one method to the other, in steps to the target."""

        def came(*variants: str) -> str:
            one, own = (
                ", ".join(self._came(found, v, rate(v)) for v in variants)
                for rate in (lambda _: self.common, lambda v: found["best"][v])
            )
            return f"{one} at lr {self.common:g}, {own} at own rates"

        return (
            f"In steps to {100 * self.target:g} %, along the same way (product rule, factored rule, sketched, identity dropped "
            f"from what is not kept): {came(PUBLISHED, LIKE, KEPT, RANDOMIZED)}. With the identity left out altogether, exact "
            f"K-FAC and RS-KFAC: {came(FACTORED_UNBIASED, UNBIASED)}."
        )

    def _longer(self, found: Found) -> str:
        """Whether dropping the identity makes steps longer: it should show where rates are small, and in the best rate."""
        low = f"{min(self.rates):g}"
        dropped, kept = (found["trials"][variant][low] for variant in (RANDOMIZED, KEPT))
        if dropped is None or kept is None:
            return ""
        rates_of = [found["best"][variant] for variant in (RANDOMIZED, KEPT)]
        longer = dropped > kept and rates_of[0] < rates_of[1]
        word = (
            "So it does make steps longer, and a larger rate makes up for that." if longer else "It does not show here."
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
                [percent_around(self._ends(found, variant, rate)), self._came(found, variant, rate, spread=True)]
                for rate in (self.common, own)
            )
            lines.append([variant, *words, *at_one, f"{own:g}", *at_own])
        tried = [
            [variant, *("diverged" if v is None else f"{100 * v:.1f} %" for v in values.values())]
            for variant, values in found["trials"].items()
        ]
        return f"""
K-FAC as published and RS-KFAC as published differ in three things at once: the damping rule (the published code has the product
rule for K-FAC and the factored one for RS-KFAC), the sketch, and what becomes of the identity that the averages start from: exact
K-FAC keeps its remnant on every mode as extra damping, a sketch with a zero tail drops it from all modes that it does not keep.
Here one thing is changed at a time. All have the paper's settings otherwise (damping a tenth of the largest eigenvalue, no
momentum, statistics every 10 steps, inverses every 50, clip 0.07), a learning rate that goes up over a twentieth of the steps and
then down to zero, and rank {self.rank}: the paper's 220 in proportion to the widest layer ({self.widest} channels, not 512).

## What each one does

{table(header, lines, left=4)}

Accuracies on test data after {counted(self.epochs, "epoch")}, and steps, mean and standard deviation over
{counted(self.seeds, "seed")}. A dash: not in every seed. Own rates were ahead after {counted(self.tuning_epochs, "epoch")} of
{self.epochs}, and need not be the best at the end: of some the common rate ends higher.

{self._made_of(found)}

![curves at the common rate]({self.name}-curves.png)

## How the rates were chosen

On a tenth of the training data kept apart, after {counted(self.tuning_epochs, "epoch")} with the whole schedule, one seed that no
reported run has:

{table(["", *(f"{lr:g}" for lr in self.rates)], tried)}

{rates.at_edge(found["trials"], found["best"])}
"""

    def _came(self, found: Found, variant: str, lr: float, spread: bool = False) -> str:
        steps = self._steps(found, variant, lr)
        if steps is None:
            return "-"
        every = [row["steps"] for row in self._rows(found, variant, lr)]
        return f"{steps:.0f} ± {statistics.stdev(every):.0f}" if spread and len(every) > 1 else f"{steps:.0f}"

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Accuracy against steps at the common rate, exact and sketched beside each other."""
        figure, panels = drawing.panels(2, across="step", up="test accuracy", same_height=True)
        for axes, optimizer, title in zip(panels, ("k-fac", "rs-kfac"), ("exact K-FAC", "RS-KFAC"), strict=True):
            for position, variant in enumerate(v for v, (name, _, _) in VARIANTS.items() if name == optimizer):
                label = ", ".join(VARIANTS[variant][2][:2] if optimizer == "k-fac" else VARIANTS[variant][2][1:])
                axes.plot(
                    *trained.mean_curve(self._rows(found, variant, self.common)), **drawing.look(position), label=label
                )
            axes.set_title(title)
            axes.legend(frameon=False, fontsize=9, loc="lower right")
        return {"curves": figure}

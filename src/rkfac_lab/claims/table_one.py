"""Section 5 and Table 1: what an epoch costs at full size, the first epochs beside the published ones, and the comparison to
its end on networks that this laboratory can train, with the recommended recipe, SGD and AdamW as more rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure

from rkfac_lab.bench import step as stepping
from rkfac_lab.bench.contestants import chosen
from rkfac_lab.bench.problems import PROBLEMS
from rkfac_lab.claims import drawing, paper, published, rates
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.text import around, counted, percent_around, plain, table
from rkfac_lab.config import RunConfig, from_dict, load
from rkfac_lab.record import Run
from rkfac_lab.workloads import find

EPOCH = 196  # steps: 50,000 pictures in batches of 256
K_FAC, RS, SRE, SENG = published.TABLE_1
RECOMMENDED, SGD = "RS-KFAC, recommended", "SGD"
# The paper's four: optimizer, what they have beside the paper's settings, and rates to choose from.
PAPER: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    K_FAC: ("k-fac", {"damping_rule": "product"}, (0.03, 0.1, 0.3, 1.0, 3.0)),
    RS: ("rs-kfac", {}, (0.01, 0.03, 0.1, 0.3, 1.0)),
    SRE: ("sre-kfac", {}, (0.01, 0.03, 0.1, 0.3, 1.0)),
    SENG: ("seng", {}, (0.015, 0.05, 0.15, 0.5, 1.5)),
}
OTHERS = {RECOMMENDED: "rs-kfac+sgd", SGD: "sgd", "AdamW": "adamw"}
SHIPPED = {K_FAC: "paper-k-fac", RS: "paper-rs-kfac", SRE: "paper-sre-kfac", SENG: "paper-seng"}
TIMED = {K_FAC: "K-FAC (paper)", RS: "RS-KFAC (paper)", SRE: "SRE-KFAC (paper)", SENG: "SENG (paper)"}


@dataclass(frozen=True)
class TableOne(Claim):
    """`scales`: workload, channels of its widest layer, seeds, epochs of a trial. `full`: epochs at full size by row.

    Where a trial has not all epochs, so many `finalists` among the rates are tried again with all of them: the rate that is
    ahead early need not be the one that ends best.
    """

    name: ClassVar[str] = "table-1"
    title: ClassVar[str] = "RS-KFAC is 2.4 times as fast an epoch as K-FAC and 3.3 times as fast to a target"
    says: ClassVar[str] = (
        "“The time per epoch is ≈ 2.4× lower for our solvers than for K-FAC … time-to-accuracy speed-up factors of ≈ 3.3×.” "
        "(Section 5)"
    )

    scales: tuple[tuple[str, int, int, int], ...] = (("cifar10-mini", 64, 10, 2), ("cifar10-vgg-small", 128, 1, 1))
    problem: str = "vgg16bn"
    rounds: int = 1
    finalists: int = 2
    full: tuple[tuple[str, int], ...] = ((K_FAC, 1), (RS, 1), (SRE, 1), (SENG, 1))
    full_threads: int = 2

    def small(self) -> TableOne:
        """On the embedded digits, with a small network in the place of the paper's."""
        return replace(
            self, scales=(("digits-mlp", 1024, 1, 1),), problem="small-mlp", finalists=1, full=(), full_threads=1
        )

    # --- measuring

    def measure(self, desk: Desk) -> dict[str, Any]:
        """Costs first, then the trainings from the smallest to the largest."""
        costs = desk.part("seconds of a step", self._costs)
        scales = {workload: self._scale(desk, workload, *sizes) for workload, *sizes in self.scales}
        two = replace(desk, workers=1, threads=self.full_threads)
        first = two.train({f"full size {row}": _full(row, epochs) for row, epochs in self.full})
        return {
            "costs": costs,
            "scales": scales,
            "full": {row: _epochs(first.get(f"full size {row}")) for row, _ in self.full},
        }

    def _costs(self) -> dict[str, Any]:
        problem = PROBLEMS[self.problem]
        results = stepping.run(problem, chosen(problem, (*TIMED.values(), "RS-KFAC (default)")), self.rounds)
        return {
            result.optimizer: {
                "step": result.amortised.median,
                "ratio": result.ratio.median,
                "kinds": {kind: spread.median for kind, spread in result.seconds.items()},
            }
            for result in results
        }

    def _scale(self, desk: Desk, workload: str, widest: int, seeds: int, trial: int) -> dict[str, Any]:
        def run(row: str, lr: float, seed: int, **keys: Any) -> RunConfig:
            optimizer, arguments, _ = PAPER[row]
            given = {**arguments, "lr": lr, **({} if row == SENG else {"rank": paper.rank_at(widest)})}
            return paper.run(workload, optimizer, given, seed=seed, label=row, **{"epochs": epochs, **keys})

        def trying(length: int) -> Callable[[str, float], RunConfig]:
            return lambda row, lr: run(row, lr, rates.SEED, epochs=length, validation_share=rates.SHARE)

        epochs = find(workload).epochs
        trials, best = rates.choose(desk, {row: tried for row, (_, _, tried) in PAPER.items()}, trying(trial), workload)
        finals: dict[str, dict[str, float | None]] = {}
        if trial < epochs and self.finalists > 1:
            ahead = {row: rates.leading(values, self.finalists) for row, values in trials.items()}
            finals, best = rates.choose(desk, ahead, trying(epochs), f"{workload} final")
        wanted: dict[tuple[str, int], RunConfig] = {}
        for seed in range(seeds):
            wanted |= {(row, seed): run(row, best[row], seed) for row in PAPER}
            wanted |= {
                (row, seed): from_dict({"workload": workload, "optimizer": {"name": name}, "seed": seed, "label": row})
                for row, name in OTHERS.items()
            }
        runs = desk.train({f"{workload} {row} seed {seed}": config for (row, seed), config in wanted.items()})
        targets = [target.value for target in find(workload).targets]
        return {
            "trials": trials,
            "finals": finals,
            "best": best,
            "targets": targets,
            "rank": paper.rank_at(widest),
            "rows": {
                row: [
                    _outcome(runs[f"{workload} {row} seed {seed}"], targets)
                    for seed in range(seeds)
                    if f"{workload} {row} seed {seed}" in runs
                ]
                for row in (*PAPER, *OTHERS)
            },
        }

    # --- telling

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        cheaper = found["costs"][TIMED[K_FAC]]["step"] / found["costs"][TIMED[RS]]["step"]
        exact, sketched = (_added(found["costs"], TIMED[row]) for row in (K_FAC, RS))
        sooner = {workload: _sooner(scale) for workload, scale in found["scales"].items()}
        known = [ratio.times for ratio in sooner.values() if ratio is not None]
        passed = (cheaper >= 2) + bool(known and min(known) >= 2)
        names = ", ".join(f"{workload} ({counted(seeds, 'seed')})" for workload, _, seeds, _ in self.scales)
        told = "; ".join(
            f"on {workload} to its hardest target that both met in every run {ratio} times as fast"
            if ratio is not None
            else f"on {workload} they met no target both in every run"
            for workload, ratio in sooner.items()
        )
        return Verdict(
            {2: HOLDS, 1: PARTLY, 0: FAILS}[passed],
            f"{PROBLEMS[self.problem].name} (seconds of a step), {names}",
            f"A step of RS-KFAC at full size is {cheaper:.2f} times as fast as one of K-FAC on this machine "
            f"({counted(self.rounds, 'round')}{', no spread' * (self.rounds == 1)}; the paper's GPU, by its table: "
            f"2.32): the two add {plain(sketched)} and {plain(exact)} seconds to the {plain(found['costs'][SGD]['step'])} of "
            f"SGD's. "
            f"In CPU seconds, {told} (the paper: 3.3).",
        )

    def rule(self, found: Found) -> str:
        """The same for every measurement."""
        return (
            "it holds if an epoch of RS-KFAC costs half of K-FAC's or less at full size, and its CPU seconds to the "
            "hardest target "
            "that both met in every run are half of K-FAC's or less on every workload; partly if one of the two is so. ± is a "
            "standard error over the seeds; one run has none."
        )

    def page(self, found: Found) -> str:
        """What an epoch costs, the first epochs, and a Table 1 for each workload."""
        parts = [_published_text(), self._cost_text(found["costs"])]
        if found["full"]:
            parts.append(self._full_text(found["full"]))
        parts += [self._scale_text(workload, seeds, found["scales"][workload]) for workload, _, seeds, _ in self.scales]
        return "\n\n".join(parts)

    def _cost_text(self, costs: Mapping[str, Any]) -> str:
        base, lines = costs[TIMED[RS]]["step"], []
        for row, name in {**TIMED, RECOMMENDED: "RS-KFAC (default)", SGD: SGD}.items():
            own = costs[name]
            cells = [plain(own["step"]), plain(EPOCH * own["step"]), f"{own['step'] / base:.2f}"]
            theirs = published.TABLE_1[row][3][0] / published.TABLE_1[RS][3][0] if row in published.TABLE_1 else None
            cells += ["-" if theirs is None else f"{theirs:.2f}", plain(_added(costs, name)) if name != SGD else "-"]
            kinds = [own["kinds"].get(kind) for kind in ("plain", "statistics", "refresh")]
            lines.append([row, *cells, *("-" if seconds is None else plain(seconds) for seconds in kinds)])
        header = ["", "seconds of a step", f"x {EPOCH}: an epoch", "x RS-KFAC's", "the paper's", "more than SGD's"]
        header += ["a plain step", "with statistics", "with inverses too"]
        return f"""## What an epoch costs: {PROBLEMS[self.problem].name}

{table(header, lines)}

A step is the mean over one period (statistics every 10 steps, inverses every 50, SENG's curvature every 200), from steps of each
kind timed in turn with the others' ({counted(self.rounds, "round")}). The paper's ratios are those of its GPU. What
an optimizer adds to SGD's step is its own part; the rest is forward and backward."""

    def _full_text(self, full: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
        lines = []
        for row, epochs in full.items():
            theirs = published.FIRST_EPOCHS.get(row, ())
            for number, (ours, runs) in enumerate(zip_longest(epochs, theirs[: len(epochs)]), start=1):
                known = "no log was published"
                if runs is not None:
                    known = f"{runs[0]:.1f} % ({runs[1]:.1f} to {runs[2]:.1f}, {counted(published.RUNS[row], 'run')})"
                seconds = plain(ours["cpu_seconds"])
                lines.append([row, str(number), f"{100 * ours['test_accuracy']:.1f} %", known, seconds])
        header = ["", "epoch", "here", "published runs: mean (smallest to largest)", "CPU seconds until then"]
        return f"""## The first epochs at full size

{table(header, lines)}

One seed, {counted(self.full_threads, "thread")}; a copy of the pictures that was compressed once more. CPU seconds are
those of all threads, with their waiting for each other. K-FAC has the factored damping rule at full size (trained here and
timed above), that of the paper's text; the published runs had the product rule, as K-FAC has on the smaller networks below.
The rest needs a GPU: `rkfac compare cifar10-vgg16bn --seeds 10`, for K-FAC as published with `--set
paper-k-fac.damping_rule=product`."""

    def _scale_text(self, workload: str, seeds: int, scale: Mapping[str, Any]) -> str:
        targets = scale["targets"]
        header = ["", "lr", *(f"CPU s to {100 * value:g} %" for value in targets), "CPU s of an epoch"]
        header += [
            *(f"epochs to {100 * value:g} %" for value in targets),
            *(f"runs that hit {100 * value:g} %" for value in targets),
            "at the end",
        ]
        lines = []
        for row, runs in scale["rows"].items():
            hits = [
                [run["seconds"][at] for run in runs if run["seconds"][at] is not None] for at in range(len(targets))
            ]
            epochs = [[found for run in runs if (found := _epochs_to(run, value)) is not None] for value in targets]
            lines.append(
                [
                    row,
                    f"{scale['best'][row]:g}" if row in scale["best"] else "tuned",
                    *(around(values) if values else "-" for values in hits),
                    around([run["epoch"] for run in runs]),
                    *(around(values) if values else "-" for values in epochs),
                    *(f"{len(values)} of {len(runs)}" for values in hits),
                    percent_around([run["end"] for run in runs if run["end"] is not None]),
                ]
            )
        finals = rates.told(scale["finals"])
        again = (
            f" The best of these were tried again with all epochs, and decided: {finals} (a rule that was made after a rate "
            "which led in short trials had been seen to end behind)."
            if finals
            else ""
        )
        return f"""## {workload}: to the end, {counted(seeds, "seed")}

{table(header, lines)}

Mean and standard deviation over the runs that met a target: where only some of a row did, they are its quickest. Runs of other
hours had other work beside them, and CPU seconds count some of it{_unrest(scale)}; epochs do not, and compare over all
rows. The paper's four have its settings, with rank {scale["rank"]} (220 in
proportion to the widths), the product rule for K-FAC, as published, and the best of these rates on validation data with a shorter
budget: {rates.told(scale["trials"])}.{again}
{rates.at_edge(scale["trials"], scale["best"])}
The other three have the numbers that were tuned for SGD and AdamW, RS-KFAC SGD's. Every rate goes up over a twentieth of the
steps and then down to zero.

![{workload}]({self.name}-{workload}.png)"""

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Accuracy against epochs and CPU seconds, one picture a workload."""
        made = {}
        for workload, scale in found["scales"].items():
            figure, (by_epoch, by_seconds) = drawing.panels(2, across="epoch", up="test accuracy", same_height=True)
            by_seconds.set_xlabel("CPU seconds")
            for position, (row, runs) in enumerate(scale["rows"].items()):
                curves = [run["curve"] for run in runs]
                points = list(zip(*curves, strict=False))
                for axes, at in ((by_epoch, 0), (by_seconds, 1)):
                    x = [statistics.fmean(point[at] for point in column) for column in points]
                    y = [statistics.fmean(point[2] for point in column) for column in points]
                    axes.plot(x, y, label=row, **drawing.look(position))
                    if len(runs) > 1:
                        off = [statistics.stdev(point[2] for point in column) for column in points]
                        low, high = ([a + sign * b for a, b in zip(y, off, strict=True)] for sign in (-1, 1))
                        axes.fill_between(x, low, high, color=drawing.look(position)["color"], alpha=0.12, linewidth=0)
            for axes in (by_epoch, by_seconds):
                drawing.note(axes, [(value, f"{100 * value:g} %") for value in scale["targets"]], left=True)
            curves, labels = by_epoch.get_legend_handles_labels()
            figure.legend(curves, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=len(labels))
            most = max(map(len, scale["rows"].values()))
            of = f"mean and standard deviation of {most} runs" if most > 1 else "one run"
            figure.suptitle(f"{workload}: {of}", fontsize=12)
            made[workload] = figure
        return made


def _published_text() -> str:
    """The paper's own table."""
    lines = [
        [row, *(f"{mean:g} ± {off:g}" for mean, off in times), f"{hits} of 10", f"{epochs[0]:g} ± {epochs[1]:g}"]
        for row, (*times, hits, epochs) in published.TABLE_1.items()
    ]
    header = ["", "s to 90 %", "s to 91.5 %", "s to 92 %", "s of an epoch", "runs that hit 92 %", "epochs to 92 %"]
    return f"""## What the paper has

{table(header, lines)}

VGG16_bn on CIFAR-10, 50 epochs, on its GPU."""


def _added(costs: Mapping[str, Any], name: str) -> float:
    """Seconds of a step beyond SGD's."""
    return float(costs[name]["step"] - costs[SGD]["step"])


def _full(row: str, epochs: int) -> RunConfig:
    """The run as the paper's text has it, cut after some epochs."""
    return from_dict({**load(SHIPPED[row]).to_dict(), "max_steps": epochs * EPOCH, "evaluate_steps": 0})


def _epochs(run: Run | None) -> list[dict[str, float]]:
    kept = ("test_accuracy", "cpu_seconds")
    return [] if run is None else [{key: line[key] for key in kept} for line in run.epochs]


def _outcome(run: Run, targets: Sequence[float]) -> dict[str, Any]:
    """Seconds to each target and of an epoch, the end, and the curve."""
    lines = run.epochs
    first = [next((line for line in lines if line["test_accuracy"] >= value), None) for value in targets]
    done = max((line["epochs_done"] for line in lines), default=1.0)
    return {
        "seconds": [None if line is None else line["cpu_seconds"] for line in first],
        "epoch": run.summary["cpu_seconds"] / done,
        "end": lines[-1]["test_accuracy"] if lines else None,
        "curve": [[line["epochs_done"], line["cpu_seconds"], line["test_accuracy"]] for line in lines],
    }


def _epochs_to(run: Mapping[str, Any], target: float) -> float | None:
    """Of one run, until its accuracy is at the target."""
    return next((float(epochs) for epochs, _, accuracy in run["curve"] if accuracy >= target), None)


def _unrest(scale: Mapping[str, Any]) -> str:
    """How far the CPU seconds of an epoch of one and the same row lie apart, at most; empty where it has one run."""
    costs = {row: [run["epoch"] for run in runs] for row, runs in scale["rows"].items() if len(runs) > 1}
    if not costs:
        return ""
    spread, row = max((max(mine) / min(mine), row) for row, mine in costs.items())
    return f" (an epoch of {row} took up to {spread:.1f} times as many in one run as in another)"


class Ratio(NamedTuple):
    """Of two means, and its standard error; none of single runs."""

    times: float
    error: float | None

    def __str__(self) -> str:
        """As 1.08 ± 0.05."""
        return f"{self.times:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def _sooner(scale: Mapping[str, Any]) -> Ratio | None:
    """K-FAC's CPU seconds to the hardest target that both met in every run, over RS-KFAC's."""
    exact, sketched = scale["rows"][K_FAC], scale["rows"][RS]
    for at in reversed(range(len(scale["targets"]))):
        times = [[run["seconds"][at] for run in runs] for runs in (exact, sketched)]
        if all(times) and not any(None in own for own in times):
            means = [statistics.fmean(own) for own in times]
            ratio = means[0] / means[1]
            if min(map(len, times)) < 2:
                return Ratio(ratio, None)
            parts = (statistics.variance(own) / len(own) / mean**2 for own, mean in zip(times, means, strict=True))
            return Ratio(ratio, ratio * sum(parts) ** 0.5)
    return None

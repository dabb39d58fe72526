"""What is lost of a step by keeping the paper's 220 modes at the paper's damping, and what of a training?

Truncation is exact here: no sketch blurs what the rank does. The modes that are not kept count as zero (the paper) or as their
mean, and the averages are looked at with the identity they start from and without it, as they are after a long training.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from matplotlib.figure import Figure

from rkfac_lab.claims import drawing, paper, truncated_training
from rkfac_lab.claims.captured import OLD, YOUNG, Subject, captured
from rkfac_lab.claims.claim import FAILS, HOLDS, PARTLY, Claim, Found, Verdict
from rkfac_lab.claims.desk import Desk
from rkfac_lab.claims.text import around, counted, plain, share, table
from rkfac_lab.claims.truncated_training import AUTO, Variant
from rkfac_lab.claims.truncation import LARGE_COSINE, SMALL_ERROR, TAILS, is_enough, measured
from rkfac_lab.record import Run

Row = Mapping[str, Any]

PAPERS = (0.1, "largest")  # damping
LEAST = 1e-5  # error in a picture; what is smaller is drawn there


@dataclass(frozen=True)
class Rank(Claim):
    """`subjects`: where factors come from and what is trained; `fractions`, `trained`: of the proportional rank."""

    name: ClassVar[str] = "rank-220"
    title: ClassVar[str] = "Rank 220 loses nothing at a tenth of the largest eigenvalue"
    says: ClassVar[str] = (
        "“We can choose (r + r_l) ≪ min(d_A, d_Γ) with minimal truncation error”: eigenvalues fall by 1.5 orders of magnitude "
        "within the first 200, and what is below that is washed away by a damping of a tenth of the largest."
    )

    subjects: tuple[Subject, ...] = (
        Subject(
            "cifar10-vgg-small",
            128,
            0.3,
            2,
            ("features.10", "features.24", "features.37", "classifier.0"),
            (10, 60, 160),
        ),
        Subject("fashion-autoencoder", 1000, 0.03, 2, ("1", "5", "14"), (10, 60, 160)),
    )
    fractions: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
    dampings: tuple[tuple[float, str], ...] = (
        (0.3, "largest"),
        PAPERS,
        (0.05, "largest"),
        (0.01, "largest"),
        (1.0, "mean"),
    )
    steps: int = 200  # of a training
    seeds: int = 2
    trained: tuple[float, ...] = (0.25, 1.0)

    def small(self) -> Rank:
        """On the embedded digits."""
        return replace(
            self,
            subjects=(Subject("digits-autoencoder", 256, 0.03, 1, ("3", "12"), (3, 20)),),
            steps=12,
            seeds=1,
            trained=(1.0,),
        )

    @property
    def _subjects(self) -> list[Subject]:
        return [Subject(*values) for values in self.subjects]

    @property
    def variants(self) -> list[Variant]:
        """Every training of a subject."""
        return truncated_training.variants(self.trained)

    def measure(self, desk: Desk) -> dict[str, Any]:
        """First the steps made of captured factors, then what an automatic rank keeps in the same trainings, then losses."""
        rows: list[dict[str, Any]] = []
        subjects = self._subjects
        for subject in subjects:
            ranks = [max(1, round(fraction * subject.rank)) for fraction in self.fractions]
            for layer in captured(desk, subject):
                title = f"truncated {layer.workload} layer {layer.layer} step {layer.step}"
                rows += desk.part(title, partial(_listed, layer, ranks, self.dampings))
        automatic_runs = desk.train({f"auto rank {s.workload}": s.run(rank=AUTO) for s in subjects})
        kept = {s.workload: _kept(automatic_runs.get(f"auto rank {s.workload}"), s.layers) for s in subjects}
        losses = truncated_training.trained(desk, subjects, self.variants, self.steps, self.seeds)
        return {"rows": rows, "kept": kept, "losses": losses}

    # --- what was found

    def judged(self, found: Found, average: str = YOUNG, tail: str = "zero", itself: bool = False) -> list[float]:
        """Relative errors of the step at the paper's damping, one a layer and time.

        At the proportional rank, or at the paper's `itself`, whichever rank that was tried is the nearest to it.
        """
        found_errors = []
        for subject in self._subjects:
            ranks = [round(fraction * subject.rank) for fraction in self.fractions]
            wanted = paper.RANK if itself else subject.rank
            position = min(range(len(ranks)), key=lambda at: abs(ranks[at] - wanted))
            rows = _rows(found, workload=subject.workload, average=average, tail=tail)
            found_errors += [row["relative"][position] for row in rows]
        return found_errors

    def step_is_kept(self, found: Found, itself: bool = False) -> list[bool]:
        """Whether every layer's step is with the paper's tail, of averages with the identity and without."""
        judged = [self.judged(found, average, itself=itself) for average in (YOUNG, OLD)]
        return [bool(errors) and all(error < SMALL_ERROR for error in errors) for errors in judged]

    def loss_is_kept(self, found: Found) -> bool:
        """Whether every training's loss is no larger than with all modes, with both tails."""
        judged = truncated_training.judged(found["losses"], self._subjects)
        return all(excess is not None and excess.share <= excess.chance for _, _, excess in judged)

    def verdict(self, found: Found) -> Verdict:
        """As `rule` says."""
        kept, losses = self.step_is_kept(found), self.loss_is_kept(found)
        partly = losses or any(kept) or any(self.step_is_kept(found, itself=True))
        word = HOLDS if all(kept) and losses else PARTLY if partly else FAILS
        where = " and ".join(f"{subject.workload} (rank {subject.rank})" for subject in self._subjects)
        runs = f"trainings of {counted(self.steps, 'step')}, {counted(self.seeds, 'seed')}"
        return Verdict(word, f"factors of {where}; {runs}", self._why(found))

    def _why(self, found: Found) -> str:
        def good(average: str, tail: str, itself: bool = False) -> str:
            values = self.judged(found, average, tail, itself)
            return f"{sum(value < SMALL_ERROR for value in values)} of {len(values)}"

        told = "; ".join(
            f"averages {average}, {good(average, 'zero')} at the proportional rank and {good(average, 'zero', True)} at "
            f"{paper.RANK} or next to it ({good(average, 'trace')} at the proportional rank with a trace tail)"
            for average in (YOUNG, OLD)
        )
        losses = ", ".join(
            f"{'-' if excess is None else f'{100 * excess.share:+.1f} %'} on {subject.workload}"
            for subject, tail, excess in truncated_training.judged(found["losses"], self._subjects)
            if tail == "zero"
        )
        return (
            f"With what is not kept counted as zero the step is within {share(SMALL_ERROR, 0)} in these cases: {told}; "
            f"a training's loss after {self.steps} steps, against that of all modes: {losses}."
        )

    def rule(self, found: Found) -> str:
        """The same for every measurement."""
        return (
            f"it holds if every step is within {share(SMALL_ERROR, 0)} at the proportional rank with the paper's zero tail, of "
            "averages with the identity and without, and no training's loss is larger than with all modes by more than the "
            f"seeds' spread or {share(truncated_training.SPREAD, 0)}, with either tail. It holds partly if one of these is so, "
            f"or if every step is at the paper's {paper.RANK} modes themselves, which on these narrower networks are a larger "
            "share of all modes than at the paper's widths. (Made when the figures were known: before, only averages with the "
            "identity and proportional ranks were judged, and the claim did not hold.)"
        )

    # --- what is read

    def page(self, found: Found) -> str:
        """Errors against rank, then against damping, which rank is enough, and losses."""
        return f"""
The paper keeps 220 modes of factors of layers up to 512 channels wide; here the rank is as many in proportion to the widest
layer. A step is S = (G + l)^-1 J (A + l)^-1, J the gradient of one batch, with both factors truncated to that rank, exactly and
not by a sketch, compared with the step of all modes. What stands for the modes that are not kept is zero (the paper) or their
mean, so that the trace stays what it was (tail "trace").

Factors and gradients were kept at several steps of a training by RS-KFAC with the paper's settings, but for statistics every
other step, and on the autoencoder a tenth of the rate, for at the paper's the loss goes up first. The averages start from the
identity, whose remnant is a floor under all eigenvalues. With it a zero tail is wrong by that floor, and a spectrum may be flat.
Figure 1's output factors came to their equilibrium after some 5100 steps, 170 updates of the averages; with the statistics of
Section 5, every 10 steps, that are 9 epochs. All is therefore said twice: of the averages as they are, and with the identity
taken out, as later in a training.

## The step at the paper's damping, by rank

Relative error, median and (largest) over layers and times:

{self._by_rank(found)}

Cosine between the two steps, median and (smallest):

{self._cosines(found)}

![error against rank]({self.name}-steps.png)

## By damping, at the proportional rank

Relative error and cosine, medians over layers and times:

{self._by_damping(found)}

## Which rank is enough

The smallest with a relative error below {share(SMALL_ERROR, 0)} and a cosine above {LARGE_COSINE} at the paper's damping, at the
last time looked at (ranks are tried in steps of a quarter), for zero and trace tail. Beside it the ranks (input, output) that the
rule of rank="auto" asks for of the same factors, and whether they are enough in the same sense; and what rank="auto" kept at the
end of the same training with a zero tail, where it is at most 256 and what the batch makes affordable.

{self._enough(found)}

{self._finds(found)}

## The loss after {self.steps} steps

The paper's settings, statistics every 10 steps included, at the rates above; mean and standard deviation over
{counted(self.seeds, "seed")}. The training loss is the mean over the last sixth of the steps; "against all modes": how much
larger it is than with all modes, the same averages and the same damping (of the largest eigenvalue). Without the identity:
averages that are free of their start from the beginning (factor_start="unbiased").

{self._trained_table(found)}
"""

    def _by_rank(self, found: Found) -> str:
        lines = []
        for subject in self._subjects:
            for average in (YOUNG, OLD):
                for tail in TAILS:
                    rows = _rows(found, workload=subject.workload, average=average, tail=tail)
                    columns = zip(*(row["relative"] for row in rows), strict=True)
                    cells = [f"{share(statistics.median(values))} ({share(max(values))})" for values in columns]
                    lines.append([subject.workload, average, tail, *cells])
        ranks = [f"{fraction:g} r" for fraction in self.fractions]
        proportional = ", ".join(f"{Subject(*values).rank} on {values[0]}" for values in self.subjects)
        itself = [
            f" On {values[0]} {fraction:g} r are the paper's {paper.RANK} modes themselves."
            for values in self.subjects
            for fraction in self.fractions
            if round(fraction * Subject(*values).rank) == paper.RANK
        ]
        shown = table(["", "averages", "tail", *ranks], lines, left=3)
        return f"{shown}\n\nThe proportional rank r is {proportional}.{''.join(itself)}"

    def _cosines(self, found: Found) -> str:
        lines = []
        for subject, average, tail in itertools.product(self._subjects, (YOUNG, OLD), TAILS):
            rows = _rows(found, workload=subject.workload, average=average, tail=tail)
            columns = zip(*(row["cosine"] for row in rows), strict=True)
            cells = [f"{plain(statistics.median(values), 4)} ({plain(min(values), 4)})" for values in columns]
            lines.append([subject.workload, average, tail, *cells])
        return table(["", "averages", "tail", *(f"{fraction:g} r" for fraction in self.fractions)], lines, left=3)

    def _by_damping(self, found: Found) -> str:
        position, lines = self.fractions.index(1.0), []
        for subject, damping in itertools.product(self._subjects, self.dampings):
            cells = []
            for average, tail in itertools.product((YOUNG, OLD), TAILS):
                rows = _rows(found, damping, workload=subject.workload, average=average, tail=tail)
                relative, cosine = (
                    statistics.median(row[what][position] for row in rows) if rows else None
                    for what in ("relative", "cosine")
                )
                cells.append(f"{share(relative)}, {plain(cosine, 4)}")
            lines.append([subject.workload, f"{damping[0]:g} of the {damping[1]}", *cells])
        header = ["", "damping", *(f"{average}, {tail} tail" for average in (YOUNG, OLD) for tail in TAILS)]
        return table(header, lines, left=2)

    def _last(self, found: Found, average: str, tail: str) -> list[tuple[Row, Sequence[int] | None]]:
        """Rows of the last time, and what an automatic rank kept of that layer in a training."""
        shown: list[tuple[Row, Sequence[int] | None]] = []
        for subject in self._subjects:
            rows = _rows(found, workload=subject.workload, average=average, tail=tail, step=max(subject.steps))
            shown += [(row, found["kept"].get(subject.workload, {}).get(row["layer"])) for row in rows]
        return shown

    def _enough(self, found: Found) -> str:
        lines = []
        for average in (YOUNG, OLD):
            both = zip(self._last(found, average, "zero"), self._last(found, average, "trace"), strict=True)
            for (zero, kept), (trace, _) in both:
                cells = [f"{zero['enough']}, {trace['enough']}"]
                for row in (zero, trace):
                    says = "enough" if is_enough(row["auto"]["relative"], row["auto"]["cosine"]) else "not enough"
                    cells.append(f"{_pair(row['auto']['ranks'])}: {says}")
                training = _pair(kept) if average == YOUNG and kept else ""
                lines.append([zero["workload"], zero["layer"], average, _pair(zero["widths"]), *cells, training])
        header = ["", "layer", "averages", "widths", "enough", "auto's rule, zero tail", "auto's rule, trace tail"]
        return table([*header, "kept in training"], lines, left=3)

    def _finds(self, found: Found) -> str:
        """Whether the automatic rule finds the rank that is enough, in one sentence."""
        told = []
        for tail in TAILS:
            rows = [row for average in (YOUNG, OLD) for row, _ in self._last(found, average, tail)]
            good = sum(is_enough(row["auto"]["relative"], row["auto"]["cosine"]) for row in rows)
            error = statistics.median(row["auto"]["relative"] for row in rows) if rows else None
            told.append(f"with a {tail} tail in {good} of {len(rows)} cases (median error {share(error)})")
        return (
            f"The automatic rule keeps enough {' and '.join(told)}. It lets a discarded mode change the inverse by a tenth, "
            f"where {share(SMALL_ERROR, 0)} of the step are asked for here."
        )

    def _trained_table(self, found: Found) -> str:
        rows, lines = found["losses"], []
        for subject in self._subjects:
            for variant in self.variants:
                excess = truncated_training.excess(rows, subject, variant)
                against = "" if variant.tail is None else "-" if excess is None else f"{100 * excess.share:+.1f} %"
                values = [truncated_training.losses(rows, subject, variant, what) for what in ("loss", "test_loss")]
                cells = [around(own) if own else "-" for own in values]
                lines.append([subject.workload, variant.title(subject), cells[0], against, cells[1]])
        return table(["", "", "training loss", "against all modes", "test loss"], lines, left=2)

    def pictures(self, found: Found) -> dict[str, Figure]:
        """Error of the step against the rank at the paper's damping, every layer at its last time."""
        cases = [(average, tail) for average in (YOUNG, OLD) for tail in TAILS]
        figure, frames = drawing.panels(
            len(cases),
            across="rank / proportional rank",
            up=f"relative error of the step ({LEAST:g}: or less)",
            same_height=True,
        )
        for axes, (average, tail) in zip(frames, cases, strict=True):
            for position, (row, _) in enumerate(self._last(found, average, tail)):
                heights = [max(error, LEAST) for error in row["relative"]]
                label = f"{row['workload']} {row['layer']}"
                axes.plot(self.fractions, heights, **drawing.look(position, marked=True), label=label)
            drawing.note(axes, [(SMALL_ERROR, share(SMALL_ERROR, 0))])
            drawing.logarithmic(axes.yaxis)
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.fractions, [f"{fraction:g}" for fraction in self.fractions])
            axes.set_title(f"{average}, {tail} tail")
        drawing.names_below(figure, frames[-1])
        return {"steps": figure}


def _listed(*given: Any) -> list[dict[str, Any]]:
    return list(measured(*given))


def _rows(found: Found, damping: Sequence[Any] = PAPERS, **own: Any) -> list[Row]:
    """Rows with this damping and these values."""
    return [
        row
        for row in found["rows"]
        if tuple(row["damping"]) == tuple(damping) and all(row[key] == wanted for key, wanted in own.items())
    ]


def _kept(run: Run | None, layers: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of input and output at the end of a training, by layer."""
    if run is None or not run.layers:
        return {}
    last = {record["name"]: record for record in run.layers[-1]["layers"]}
    return {name: [last[name]["rank_input"], last[name]["rank_output"]] for name in layers if name in last}


def _pair(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))

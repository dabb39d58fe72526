"""What the numbers of a report mean, in words: what was seen, what that means, what can be done about it.

Only what is certain from the numbers is said. Thresholds are what is worth a person's time, not what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rkfac.optim.report import LayerReport, Report
from rkfac.optim.report_text import by_reason, counted, listed, wrapped

LEFT_OUT = 0.01  # of the trained parameters
CLIPPED = 0.9  # of the steps
FEW_STEPS = 20  # below, a share of steps says little
CUT = 4.0  # times too far
LOW = (
    0.1  # largest eigenvalue in units of the damping: up to there no direction is treated differently by more than that
)
DOMINATES = 0.25  # of all seconds
SETTLED = 4  # periods after which the many statistics and refreshes of the start no longer count much
WIDER = 10.0  # times the rows that an average remembers


class Remark(NamedTuple):
    """One thing that stands out; `about` names its kind, `layers` whom it concerns (nobody in particular: none)."""

    about: str
    text: str
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


class Advice(list[Remark]):
    """All that stands out, the gravest first; printed, a paragraph each, or that nothing does."""

    def __str__(self) -> str:
        said = "\n".join(wrapped(f"- {remark}") for remark in self)
        return said or "Nothing stands out: all is well as far as the numbers tell."

    __repr__ = __str__


def advice(report: Report) -> Advice:
    """Every remark that there is reason for."""
    return Advice(remark for rule in RULES for remark in rule(report))


def _refused(report: Report) -> Iterator[Remark]:
    if report.refused:
        yield Remark(
            "refused updates",
            f"The last update of {listed(report.refused)} held NaN or Inf and was left out. The loss or a gradient has left the "
            "range of numbers: lower the learning rate, raise the damping, or look for the first batch that does it.",
            report.refused,
        )


def _failures(report: Report) -> Iterator[Remark]:
    failed = [layer for layer in report if layer.failures]
    if failed:
        worst = max(layer.failures for layer in failed)
        yield Remark(
            "failed decompositions",
            f"The last {counted(worst, 'decomposition')} of {_listed(failed)} failed, so that an older basis is in use or "
            "none: raise the damping, lower the learning rate, or exclude the layer.",
            _names(failed),
        )


def _waiting(report: Report) -> Iterator[Remark]:
    """Covered layers that have nothing to be preconditioned with though steps were taken."""
    waiting = [layer for layer in report if layer.covered and layer.reason and report.steps]
    for reason, layers in by_reason(waiting):
        yield Remark(
            "layers without curvature",
            f"After {counted(report.steps, 'step')} {_listed(layers)} ({_share(layers, report)} of the trained parameters) still "
            f"takes plain steps: {reason}. Use the layers in the forward pass, hand the very model that is trained to the "
            "optimizer, or exclude them.",
            _names(layers),
        )


def _left_out(report: Report) -> Iterator[Remark]:
    left = [layer for layer in report if not layer.covered and layer.trained]
    if not left or sum(layer.trained for layer in left) < LEFT_OUT * report.trained:
        return
    reasons = [f"{_listed(layers)} ({_share(layers, report)}): {reason}" for reason, layers in by_reason(left)]
    yield Remark(
        "layers left out",
        f"{_share(left, report)} of the trained parameters are not preconditioned and train by {report.fallback!r}: "
        f"{'; '.join(reasons[:3])}{f'; and {len(reasons) - 3} other reasons' if len(reasons) > 3 else ''}. They learn as fast "
        "as that rule does: cover what can be covered (include=, exclude=, max_factor_dim=, rkfac.register for layers of your "
        "own), or tune fallback_scale=.",
        _names(left),
    )


def _frozen(report: Report) -> Iterator[Remark]:
    frozen = [layer for layer in report if layer.parameters and not layer.trained]
    if frozen:
        count = sum(layer.parameters for layer in frozen)
        yield Remark(
            "frozen layers",
            f"{_listed(frozen)} ({count:,} parameters) {_do(frozen, 'is', 'are')} frozen: nothing is collected there and nothing "
            "moves. If that should train, set requires_grad_(True); curvature is then collected by itself.",
            _names(frozen),
        )


def _clipped(report: Report) -> Iterator[Remark]:
    seen = [layer for layer in report if layer.steps >= FEW_STEPS and layer.clipped >= CLIPPED * layer.steps]
    if seen:
        share = sum(layer.clipped for layer in seen) / sum(layer.steps for layer in seen)
        last = [layer.clip for layer in seen if layer.clip is not None]
        yield Remark(
            "clip always active",
            f"The clip has shortened {share:.0%} of the steps of {_listed(seen)}, the last ones to {median(last):.2g} of their "
            "length. It sets the length of these steps, and the learning rate hardly does: lower lr= until the clip acts now "
            "and then only, or raise update_clip= or kl_clip= if the training is stable.",
            _names(seen),
        )


def _short_rank(report: Report) -> Iterator[Remark]:
    cut = [(factor, layer) for layer in report for factor in (layer.cut_input, layer.cut_output) if factor is not None]
    layers = [layer for layer in report if max(layer.cut_input or 0.0, layer.cut_output or 0.0) >= CUT]
    if not layers:
        return
    worst, layer = max(cut, key=lambda entry: entry[0])
    inside = layer.cut_input == worst
    rank, captured = (layer.rank_input, layer.captured_input) if inside else (layer.rank_output, layer.captured_output)
    if report.settings.get("rank") == "auto":
        remedy = f"give a number larger than {rank} for rank= (it is 'auto', which looks at the cost as well)"
    else:
        remedy = f"raise rank= above {rank}, or say rank='auto'"
    side = "input" if inside else "output"
    yield Remark(
        "rank too small for the damping",
        f"The rank is small for the damping in {_listed(layers)}: what was cut off may lie so far above the damping that steps "
        f"along it are up to {worst:.1f} times too long. There {layer.name!r} keeps {captured or 0:.0%} of the trace on its "
        f"{side} side with rank {rank}. If progress is slow or unsteady, {remedy}, or raise damping=.",
        _names(layers),
    )


def _overdamped(report: Report) -> Iterator[Remark]:
    """Where each side changes no direction by more than LOW beside another, their product hardly does."""
    known = [layer for layer in report if layer.covered and _largest(layer)]
    low = [layer for layer in known if max(_largest(layer)) <= LOW]
    if low:
        most = max(max(_largest(layer)) for layer in low)
        yield Remark(
            "damping above the spectrum",
            f"The damping of {_listed(low)} is at least {1 / most if most else float('inf'):.3g} times their largest eigenvalue: "
            "all directions are treated alike and the step is nearly the gradient's. Lower damping= to see an effect of the "
            "curvature.",
            _names(low),
        )


def _seconds(report: Report) -> Iterator[Remark]:
    """A phase that takes much of all the time that has passed, whatever else was done in it."""
    period = report.settings.get("inverse_every", 1)
    taken = max((layer.steps for layer in report), default=0)
    if report.seconds <= 0 or taken < SETTLED * period:
        return
    every = report.settings.get("factor_every", "its value")
    rows = f", or lower rows= ({report.settings['rows'] or 'all'} now)" if "rows" in report.settings else ""
    remedies = {
        "statistics": f"raise factor_every= ({every} now){rows}",
        "refresh": f"raise inverse_every= ({period} now), or lower rank=",
        "apply": "take larger batches, of which it is a smaller part, lower rank=, or exclude= the widest layers",
    }
    for phase, spent in report.spent().items():
        if spent > DOMINATES * report.seconds:
            dearest = sorted(report, key=lambda layer: -layer.seconds.get(phase, 0.0))[:2]
            yield Remark(
                f"{phase} dominates",
                f"The phase {phase!r} took {spent / report.seconds:.0%} of the {report.seconds:.1f} s in which "
                f"{counted(taken, 'step')} were taken, most of it in {_listed(dearest)}. If a step of this optimizer is not "
                f"worth its time, {remedies[phase]}.",
                _names(dearest),
            )


def _few_rows(report: Report) -> Iterator[Remark]:
    """Averages that remember far fewer rows than they are wide."""
    most, decay = report.settings.get("rows"), report.settings.get("factor_decay", 0.0)
    memory = 1 / (1 - decay) if decay < 1 else float("inf")
    found = []
    for layer in (layer for layer in report if layer.covered and layer.updates and layer.rows):
        rows = min(layer.rows, most or layer.rows) * min(layer.updates, memory)
        sides = ((layer.input_dim, layer.kept_input), (layer.output_dim, layer.kept_output))
        width = max((d for d, kept in sides if d is not None and kept in ("dense", "online", "columns")), default=0)
        if width > WIDER * rows:
            found.append((width / rows, width, rows, layer))
    if found:
        _, width, rows, layer = max(found, key=lambda entry: entry[0])
        layers = [entry[-1] for entry in found]
        yield Remark(
            "few rows for the width",
            f"The averages of {_listed(layers)} are made of far fewer rows than they are wide: {layer.name!r} has about "
            f"{rows:,.0f} for {width:,}. Most directions were never seen and are treated alike. Larger batches, a smaller "
            "factor_every= or a factor_decay= nearer to 1 show more of them.",
            _names(layers),
        )


def _young(report: Report) -> Iterator[Remark]:
    """What a short run cannot show yet."""
    if not report.steps:
        yield Remark("no step yet", "No step was taken yet: there is nothing to judge but what is covered.")
        return
    settings = report.settings
    periods = {
        name: settings[name] for name in ("factor_every", "inverse_every") if settings.get(name, 0) > report.steps
    }
    if periods:
        said = " and ".join(f"{name}={value}" for name, value in periods.items())
        yield Remark(
            "periods longer than the run",
            f"Only {counted(report.steps, 'step')} {'was' if report.steps == 1 else 'were'} taken, fewer than {said}: the "
            "curvature in use is that of the first steps. If the whole training is as short as this, lower them.",
        )


RULES: Sequence[Callable[[Report], Iterator[Remark]]] = (
    _refused,
    _failures,
    _waiting,
    _left_out,
    _clipped,
    _overdamped,
    _short_rank,
    _seconds,
    _few_rows,
    _young,
    _frozen,
)


def _largest(layer: LayerReport) -> list[float]:
    return [value for value in (layer.largest_input, layer.largest_output) if value is not None]


def _names(layers: Sequence[LayerReport]) -> tuple[str, ...]:
    return tuple(layer.name for layer in layers)


def _listed(layers: Sequence[LayerReport]) -> str:
    return listed(_names(layers), 3)


def _share(layers: Sequence[LayerReport], report: Report) -> str:
    return f"{sum(layer.trained for layer in layers) / max(report.trained, 1):.1%}"


def _do(layers: Sequence[LayerReport], one: str, many: str) -> str:
    return one if len(layers) == 1 else many

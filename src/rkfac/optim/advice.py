"""What the numbers of a report mean, in words: what was seen, what that means, what can be done about it.

Only what is certain from the numbers is said. Thresholds are what is worth a person's time, not what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rkfac.curvature.block.settings import YOUNG
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
THEN = "; curvature is then collected by itself"
MEANING = {  # of a clip that always acts
    "update_clip": "update_clip= acts before the learning rate: while it does, it sets the length of what lr= multiplies, "
    "whatever the gradient's is, and steps are as long as lr= says. Raise it if the gradient should have a say.",
    "kl_clip": "kl_clip= bounds the whole step, learning rate included: while it acts, it sets the length, and lr= hardly "
    "does. Lower lr= until it acts now and then only, or raise it if the training is stable.",
}


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
            f"After {counted(report.steps, 'step')} {_listed(layers)} ({_share(layers, report)} of the trained parameters) "
            f"{_do(layers, 'has', 'have')} no curvature: {reason}. Until then it takes plain steps where gradients come, and "
            "none where none come. Use the layers in the forward pass, hand the very model that is trained to the optimizer, "
            "or exclude them.",
            _names(layers),
        )


def _replaced(report: Report) -> Iterator[Remark]:
    for reason, layers in by_reason(layer for layer in report if layer.replaced):
        yield Remark("replaced layers", f"{_listed(layers)}: {reason}.", _names(layers))


def _outside(report: Report) -> Iterator[Remark]:
    """Another optimizer may train them, or nobody."""
    if report.outside:
        yield Remark(
            "parameters outside",
            f"{sum(report.outside.values()):,} parameters of the model require gradients, and no group of this optimizer holds "
            f"them, so that it never moves them: {listed(report.outside)}. Unless something else trains them, call "
            "add_param_group(), or build the optimizer with all parameters.",
            tuple(report.outside),
        )


def _left_out(report: Report) -> Iterator[Remark]:
    left = [layer for layer in report if not layer.covered and layer.trained]
    if not left or sum(layer.trained for layer in left) < LEFT_OUT * report.trained:
        return
    reasons = [f"{_listed(layers)} ({_share(layers, report)}): {reason}" for reason, layers in by_reason(left)]
    still = [layer for layer in left if layer.settings.get("fallback_scale") == 0]
    fate = f"With fallback_scale=0 {_listed(still)} {_do(still, 'does', 'do')} not move" if still else ""
    yield Remark(
        "layers left out",
        f"{_share(left, report)} of the trained parameters are not preconditioned and "
        f"{'are left to' if still else 'train by'} {report.fallback!r}: "
        f"{'; '.join(reasons[:3])}{f'; and {len(reasons) - 3} other reasons' if len(reasons) > 3 else ''}. "
        f"{fate or 'They learn as fast as that rule does'}: cover what can be covered (include=, exclude=, max_factor_dim=, "
        f"rkfac.register for layers of your own), or {'raise' if still else 'tune'} fallback_scale=.",
        _names(left),
    )


def _frozen(report: Report) -> Iterator[Remark]:
    frozen = [layer for layer in report if layer.frozen and not layer.trained]
    if frozen:
        count = sum(layer.frozen for layer in frozen)
        outside = [layer for layer in frozen if layer.outside]
        join = f" For {_listed(outside)}, which no group holds, call add_param_group() too, or build a new optimizer."
        yield Remark(
            "frozen layers",
            f"{_listed(frozen)} ({count:,} parameters) {_do(frozen, 'is', 'are')} frozen: nothing is collected there and nothing "
            f"moves. If that should train, set requires_grad_(True){'' if outside else THEN}.{join if outside else ''}",
            _names(frozen),
        )


def _clipped(report: Report) -> Iterator[Remark]:
    seen = [layer for layer in report if layer.steps >= FEW_STEPS and layer.clipped >= CLIPPED * layer.steps]
    if seen:
        share = sum(layer.clipped for layer in seen) / sum(layer.steps for layer in seen)
        last = [layer.clip for layer in seen if layer.clip is not None]
        since = "" if report.taken == report.steps else " that this object took"
        clips = {name for layer in seen for name in MEANING if layer.settings.get(name) is not None}
        yield Remark(
            "clip always active",
            f"The clip has shortened {share:.0%} of the steps{since} of {_listed(seen)}, the last ones to {median(last):.2g} of "
            f"their length{', by one clip or both' * (len(clips) > 1)}. "
            f"{' '.join(MEANING[name] for name in MEANING if name in clips)}",
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
    own = layer.settings.get("rank")
    if own is None:
        remedy = f"raise the rank of its decomposition above {rank}"
    elif own == "auto":
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
    period = max((layer.settings.get("inverse_every", 1) for layer in report if layer.covered), default=1)
    taken = max((layer.steps for layer in report), default=0)
    if report.seconds <= 0 or taken < SETTLED * period:
        return
    for phase, spent in report.spent().items():
        if spent > DOMINATES * report.seconds:
            dearest = sorted(report, key=lambda layer: -layer.seconds.get(phase, 0.0))[:2]
            remedies = _cheaper(dearest[0], report.settings.get("rows"))
            yield Remark(
                f"{phase} dominates",
                f"The phase {phase!r} took {spent / report.seconds:.0%} of the {report.seconds:.1f} s in which "
                f"{counted(taken, 'step')} were taken, most of it in {_listed(dearest)}. If a step of this optimizer is not "
                f"worth its time, {remedies[phase]}.",
                _names(dearest),
            )


def _cheaper(layer: LayerReport, rows: int | None) -> dict[str, str]:
    """What makes a phase cheaper, by the settings of the layer that spends most in it."""

    def longer(*names: str) -> str:
        name = next((name for name in names if name in layer.settings), "inverse_every")
        if layer.interval is not None:
            return "raise stale="
        return f"raise {name}= ({layer.settings.get(name, 'its value')} now)"

    ranked = "rank" in layer.settings
    return {
        "statistics": f"{longer('factor_every', 'inverse_every')}, or lower rows= ({rows or 'all'} now)",
        "refresh": longer("inverse_every") + (", or lower rank=" if ranked else ""),
        "apply": "take larger batches, of which it is a smaller part"
        f"{', lower rank=' if ranked else ''}, or exclude= the widest layers",
    }


def _few_rows(report: Report) -> Iterator[Remark]:
    """Averages that remember far fewer rows than they are wide."""
    most, found = report.settings.get("rows"), []
    for layer in (layer for layer in report if layer.covered and layer.updates and layer.rows):
        decay = layer.settings.get("factor_decay", 0.0)
        memory = 1 / (1 - decay) if decay < 1 else float("inf")
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
    # An eager start collects and refreshes often enough in the first steps; only then a period that is too long matters.
    eager = report.settings.get("eager_start", False)
    names = ("factor_every",) * (not eager or report.steps > YOUNG) + ("inverse_every",) * (not eager)
    longer = {
        (name, layer.settings[name]): None
        for name in names
        for layer in report
        if layer.covered and layer.interval is None and layer.settings.get(name, 0) > report.steps
    }
    if longer:
        said = " and ".join(f"{name}={value}" for name, value in longer)
        yield Remark(
            "periods longer than the run",
            f"Only {counted(report.steps, 'step')} {'was' if report.steps == 1 else 'were'} taken, fewer than {said}: the "
            f"curvature in use is that of the first {f'{YOUNG} ' * eager}steps. If the whole training is as short as this, "
            "lower them.",
        )


RULES: Sequence[Callable[[Report], Iterator[Remark]]] = (
    _refused,
    _failures,
    _replaced,
    _outside,
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

"""What an optimizer knows about itself, as a table for a person."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rkfac.optim.report import LayerReport, Report

WIDTH = 120  # columns of the table
MANY = 40  # layers from which on those that repeat themselves share a row
REASONS = 6  # shown at most
PHASES = ("statistics", "refresh", "apply")


def table(report: Report) -> list[str]:
    """One row a layer; of many layers, one row for those whose names differ by numbers alone."""
    rows = [_cells(alike) for alike in _gathered(report)]
    if not rows:
        return ["no layers"]
    names = [name for name in rows[0] if name == "layer" or any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    widths["layer"] -= max(0, sum(widths.values()) + 2 * (len(widths) - 1) - WIDTH)
    return [_line({name: name for name in names}, widths), *(_line(row, widths) for row in rows)]


def summary(report: Report) -> list[str]:
    """What holds for all layers: how much is preconditioned, what it costs, and what is not and why."""
    covered = [layer for layer in report if layer.covered and not layer.reason]
    waiting = [layer for layer in report if layer.covered and layer.reason]
    bytes_kept = sum(sum(layer.bytes.values()) for layer in report)
    ranks = [rank for layer in covered for rank in (layer.rank_input, layer.rank_output) if rank is not None]
    of_ranks = f"; ranks {min(ranks)} to {max(ranks)}" if ranks else ""
    yet = f", {_part(waiting, report)} in {counted(len(waiting), 'layer')} without curvature yet" if waiting else ""
    lines = [
        f"{_part(covered, report)} of {report.trained:,} trained parameters in {len(covered)} of "
        f"{counted(len(report), 'layer')} preconditioned{yet}{of_ranks}; {megabytes(bytes_kept)} MB",
        _seconds(report),
    ]
    left = by_reason(layer for layer in report if layer.reason and _state(layer) != "outside")
    for reason, layers in left[:REASONS]:
        state = _state(layers[0])
        still = all(layer.settings.get("fallback_scale") == 0 for layer in layers)
        how = state if state != "fallback" else "at rest (fallback_scale=0)" if still else f"by {report.fallback!r}"
        lines.append(f"{how}: {listed((layer.name for layer in layers), 3)} ({_parameters(layers)}): {reason}")
    if len(left) > REASONS:
        lines.append(f"and {len(left) - REASONS} other reasons, in the records")
    if report.outside:
        names, count = listed(report.outside, 3), sum(report.outside.values())
        lines.append(
            f"outside: {names} ({count:,} parameters): no group of the optimizer holds them, it never moves them"
        )
    return [wrapped(line) for line in lines]


def wrapped(text: str) -> str:
    """As wide as the table, what follows the first line a little to the right."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _seconds(report: Report) -> str:
    parts = [f"{phase} {spent:.2f}{share(spent, report.seconds)}" for phase, spent in report.spent().items()]
    own = f" in all, {report.taken:,} by this object" if report.taken != report.steps else ""
    return f"{counted(report.steps, 'step')}{own} in {report.seconds:.2f} s" + (
        f", of them {', '.join(parts)}" * bool(parts)
    )


def _part(layers: Iterable[LayerReport], report: Report) -> str:
    """Of all trained parameters."""
    return f"{sum(layer.trained for layer in layers) / max(report.trained, 1):.1%}"


def share(part: float, whole: float) -> str:
    """In brackets, if there is a whole."""
    return f" ({part / whole:.0%})" if whole > 0 else ""


def by_reason(layers: Iterable[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """Layers with the same reason together, the most trained parameters first."""
    found: dict[str, list[LayerReport]] = {}
    for layer in layers:
        found.setdefault(layer.reason, []).append(layer)
    return sorted(found.items(), key=lambda entry: -sum(layer.trained for layer in entry[1]))


def _gathered(report: Sequence[LayerReport]) -> list[list[LayerReport]]:
    """Layers that share a row: all alone, or those of one name but for numbers, one kind and one shape."""
    if len(report) <= MANY:
        return [[layer] for layer in report]
    alike: dict[object, list[LayerReport]] = {}
    for layer in report:
        key = (_pattern(layer.name), layer.kind, layer.input_dim, layer.output_dim, _state(layer))
        alike.setdefault(key, []).append(layer)
    return list(alike.values())


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _cells(layers: Sequence[LayerReport]) -> dict[str, str]:
    """A row, by the names of its columns; of several layers medians, and sums of seconds and bytes."""
    first = layers[0]
    named = first.name if len(layers) == 1 else f"{_pattern(first.name)} ({len(layers)})"
    clips = [layer.clip for layer in layers if layer.clip is not None]
    spent = {phase: sum(layer.seconds.get(phase, 0.0) for layer in layers) for phase in PHASES}
    timed = any(layer.seconds for layer in layers)
    return {
        "layer": named or "(the model)",
        "kind": first.kind,
        "in/out": _pair([first.input_dim], [first.output_dim], str),
        "rank": _pair([x.rank_input for x in layers], [x.rank_output for x in layers], str),
        "captured": _pair([x.captured_input for x in layers], [x.captured_output for x in layers], _percent),
        "damping": _pair([x.damping_input for x in layers], [x.damping_output for x in layers], _short),
        "clip": _short(median_low(clips)) if clips else "",
        **{phase: f"{spent[phase]:.2f}" if timed else "" for phase in PHASES},
        "MB": megabytes(sum(sum(layer.bytes.values()) for layer in layers)) if timed else "",
        "state": _state(first),
    }


def _state(layer: LayerReport) -> str:
    if layer.trained == 0 and layer.replaced:
        return "replaced"
    if layer.trained == 0 and layer.parameters:
        return "outside" if layer.outside and not layer.frozen else "frozen"
    if not layer.covered:
        return "fallback"
    return "waiting" if layer.reason else f"failed {layer.failures}" if layer.failures else ""


def _pair(inputs: Sequence[float | None], outputs: Sequence[float | None], shown: Callable[[float], str]) -> str:
    sides = [[value for value in side if value is not None] for side in (inputs, outputs)]
    return "/".join(shown(median_low(side)) if side else "-" for side in sides) if any(sides) else ""


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def _short(value: float) -> str:
    """Two digits."""
    return f"{value:.2g}" if 0.01 <= value < 100 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def megabytes(count: int) -> str:
    """Of so many bytes."""
    return f"{count / 1e6:.1f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def _line(row: dict[str, str], widths: dict[str, int]) -> str:
    words = ("layer", "kind", "state")
    cells = (
        _shortened(row[n], w).ljust(w) if n == "layer" else row[n].ljust(w) if n in words else row[n].rjust(w)
        for n, w in widths.items()
    )
    return "  ".join(cells).rstrip()


def _shortened(name: str, width: int) -> str:
    """The end of a name says more than its beginning."""
    return name if len(name) <= width else "..." + name[len(name) - max(width - 3, 0) :]


def _parameters(layers: Iterable[LayerReport]) -> str:
    return f"{sum(layer.trained or layer.parameters for layer in layers):,} parameters"


def counted(count: int, what: str) -> str:
    """1 layer, 2 layers."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names for a sentence."""
    ordered = list(names)
    shown = ", ".join(repr(name) for name in ordered[:most])
    return (shown + f" and {len(ordered) - most} more" if len(ordered) > most else shown) or "nothing"

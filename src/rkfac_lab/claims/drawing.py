"""Pictures of the claims: panels beside each other, in the colours and dashes of all other pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from rkfac_lab.plots import INK, MARKERS, colour, dash


def panels(
    count: int, *, across: str, up: str, same_height: bool = False, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` frames, named along both axes."""
    columns = min(count, columns or 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(0.6 + 5.4 * columns, 0.4 + 3.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=same_height)
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < count)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(across)
    for row in grid:
        row[0].set_ylabel(up)
    return figure, list(grid.flat[:count])


def look(position: int, *, marked: bool = False) -> dict[str, Any]:
    """Of the curve at a position; `marked`: with its measured points."""
    style: dict[str, Any] = {"color": colour(position), "linestyle": dash(position), "linewidth": 1.7}
    return {**style, "marker": MARKERS[position % len(MARKERS)], "markersize": 5} if marked else style


def logarithmic(axis: Any) -> None:
    """Ticks that are read as numbers."""
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(partial(_between, axis)))


def _between(axis: Any, value: float, _: int | None) -> str:
    """Twos and fives have names too where there are few powers of ten, and all ticks where there is hardly one."""
    low, high = axis.get_view_interval()
    lead = round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)
    return f"{value:g}" if high < 6 * low or (high < 100 * low and lead in (2, 5)) else ""


def names_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """What the curves of all frames are, below them, where no curve is."""
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def note(axes: Axes, lines: Sequence[tuple[float, str]], *, left: bool = False) -> None:
    """Thin level lines with their names at the right end, or at the left where curves end on the right."""
    at, side = (0.01, "left") if left else (0.99, "right")
    for height, name in lines:
        axes.axhline(height, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            name, (at, height), xycoords=("axes fraction", "data"), ha=side, va="bottom", fontsize=8, color=INK
        )


def as_spectrum(axes: Axes, line: float, name: str, title: str) -> None:
    """Eigenvalues relative to the largest against the number of the mode, with the line below which they do not count."""
    logarithmic(axes.xaxis)
    logarithmic(axes.yaxis)
    axes.set_ylim(1e-5, 1.5)
    note(axes, [(line, name)])
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower left")

"""The paper's figures from runs and spectra, as PNG and SVG; nothing here needs a display.

Figure 2 (`curves`): the metric and the losses against steps and against training seconds; the line is the median
over seeds, the band goes from the smallest to the largest seed. A K-FAC in another's place has an arrow from where
that one was best to where it was as good, if every seed was. Figure 1 is `spectra`, and `modes_against_width`
shows how many modes matter in layers of different width. `tuning` shows the trials of a search, `scaling` seconds
against the width of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.scale import FuncScale
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from rkfac_lab import disk
from rkfac_lab.harmless import plotted
from rkfac_lab.promise import Promise, promises
from rkfac_lab.table_text import metric_name
from rkfac_lab.tables import group_by_label, main_metric, targets_of, workload_of

if TYPE_CHECKING:
    from rkfac_lab.bench.scaling import Measurement
    from rkfac_lab.record import Run
    from rkfac_lab.search import Trial, Tuned
    from rkfac_lab.spectrum import FactorHistory

# Okabe and Ito's colours, told apart with every common colour vision.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
# A second cue beside colour, and what tells a ninth optimizer from the first.
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.2)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vP*X"
INK = "#333333"
HOLLOW: dict[str, Any] = {"linestyle": "", "fillstyle": "none", "markersize": 9}
RING: dict[str, Any] = {"marker": "o", "markersize": 15}
CROSS: dict[str, Any] = {"linestyle": "", "marker": "x", "markeredgewidth": 2}
SIDES = {"input": "input factor A", "output": "output factor Γ"}


@dataclass(frozen=True)
class Band:
    """Median and range over seeds at each evaluation; `x` is the median of the seeds' abscissas there."""

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def positions(labels: Iterable[str]) -> dict[str, int]:
    """Where each optimizer's colour and dash are: by its name, so that pictures of the same runs have them alike."""
    return {label: position for position, label in enumerate(sorted(labels))}


def colour(position: int) -> str:
    """Colour of the optimizer at this position."""
    return PALETTE[position % len(PALETTE)]


def dash(position: int) -> Any:
    """Another one for every neighbour, and for everybody who has the same colour."""
    return DASHES[(position + position // len(PALETTE)) % len(DASHES)]


def band(runs: Sequence[Run], quantity: str, against: str) -> Band:
    """Gather one quantity ("test_loss") of several seeds against another ("epoch", "train_seconds")."""
    columns = meetings(runs, quantity)
    values = [np.array([point[quantity] for point in column], dtype=float) for column in columns]
    return Band(
        x=np.array([np.median([abscissa(point, against) for point in column]) for column in columns]),
        middle=np.array([np.median(value) for value in values]),
        low=np.array([value.min() for value in values]),
        high=np.array([value.max() for value in values]),
    )


def meetings(runs: Sequence[Run], quantity: str) -> list[list[dict[str, Any]]]:
    """The evaluations of several seeds at equal steps.

    A step counts only where all seeds that finished have it, so that a seed which stopped early cannot bend the
    median; what a diverged seed measured before it broke takes part.
    """
    finished = [run for run in runs if run.summary.get("status") == "finished"] or list(runs)
    measured = [{line["step"]: line for line in run.epochs if _usable(line, quantity)} for run in runs]
    required = [set(points) for run, points in zip(runs, measured, strict=True) if run in finished]
    shared = sorted(set.intersection(*required)) if required else []
    return [[points[number] for points in measured if number in points] for number in shared]


def abscissa(line: dict[str, Any], against: str) -> float:
    """Where an evaluation stands; against "epoch", one inside an epoch stands inside it."""
    value = line.get("epochs_done", line["epoch"]) if against == "epoch" else line[against]
    return float(value)


def curves(runs: Sequence[Run], title: str | None = None) -> Figure:
    """Figure 2: metric, test loss and training loss (rows) against steps and training seconds (columns)."""
    metric, _ = main_metric(runs)
    rows = [metric, *(loss for loss in ("test_loss", "train_loss") if loss != metric)]
    rows = [row for row in rows if any(_usable(epoch, row) for run in runs for epoch in run.epochs)]
    figure = _figure(11, 0.9 + 3.1 * max(len(rows), 1))
    grid = figure.subplots(max(len(rows), 1), 2, squeeze=False, sharey="row", sharex="col")
    groups = group_by_label(runs)
    places = positions(groups)
    pairs = [pair for pair in promises(runs) if pair.reached == len(pair.arrivals)]  # a lucky seed is no story
    for row, quantity in enumerate(rows):
        for column, against in enumerate(("step", "train_seconds")):
            axes = grid[row][column]
            for label, members in groups.items():
                _draw_band(axes, band(members, quantity, against), places[label])
            if quantity == metric:
                for target in targets_of(runs):
                    axes.axhline(target.value, color=INK, linewidth=0.8, linestyle=":", zorder=1)
                for pair in pairs:
                    _draw_arrival(axes, pair, ("steps", "seconds")[column], places[pair.label])
        _scale_values(grid[row], quantity, [epoch.get(quantity) for run in runs for epoch in run.epochs])
        grid[row][0].set_ylabel(_axis_name(quantity))
    grid[-1][0].set_xlabel("step")
    grid[-1][0].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1][1].set_xlabel("training time in seconds")
    _scale_seconds(grid[-1][1], runs)
    arrows = (
        "\narrows: from where the one it replaces was best to where K-FAC was as good in every seed" if pairs else ""
    )
    figure.suptitle(plotted(title or _title(runs)) + arrows, fontsize=12, color=INK)
    _legend(figure, grid[0][0], list(groups))
    return figure


def spectra(histories: Sequence[FactorHistory], title: str) -> Figure:
    """Figure 1: eigenvalues relative to the largest, one panel a factor, one curve a recorded step.

    The dashed line lies 1.5 orders of magnitude below the largest eigenvalue, the dotted one at the number of
    modes that Proposition 3.1 allows above it, where that is fewer than the factor has.
    """
    last_step = max([1, *(step for history in histories for step in history.steps)])
    norm = SymLogNorm(linthresh=30, vmin=0, vmax=last_step)
    shades = colormaps["viridis_r"]
    rows = math.ceil(len(histories) / 2)
    widest = max((history.width for history in histories), default=0)
    figure = _figure(11, 0.9 + 3.2 * max(rows, 1))
    grid = figure.subplots(max(rows, 1), 2, squeeze=False, sharey=True)
    for axes, history in zip(grid.flat, histories, strict=False):
        for step, values in zip(history.steps, history.eigenvalues, strict=True):
            relative = np.asarray(values) / max(values[0], np.finfo(float).tiny)
            axes.plot(np.arange(1, len(values) + 1), relative, color=shades(norm(step)), linewidth=1.1)
        _decorate_spectrum(axes, history, logarithmic=widest > 400)
    for axes in grid.flat[len(histories) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("eigenvalue / largest")
    for axes in grid[-1]:
        axes.set_xlabel("mode")
    bar = figure.colorbar(ScalarMappable(norm, shades), ax=grid, pad=0.02, aspect=40)
    bar.set_label("step")
    ticks = [tick for tick in (0, 30, 100, 300, 1000, 3000, 10000, 30000) if tick <= last_step]
    bar.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    figure.suptitle(plotted(title), fontsize=12, color=INK)
    return figure


def modes_against_width(histories: Sequence[FactorHistory], title: str) -> Figure:
    """How many eigenvalues of each factor are above a 33rd of the largest, against the factor's width."""
    figure = _figure(7.5, 5.2)
    axes = figure.subplots()
    _frame(axes)
    widths = np.array(sorted({history.width for history in histories}), dtype=float)
    axes.plot(widths, widths, color=INK, linewidth=0.9, linestyle="--", label="every mode")
    for position, side in enumerate(("input", "output")):
        chosen = [history for history in histories if history.side == side]
        style: dict[str, Any] = {"color": colour(position), "marker": MARKERS[position], "linestyle": "none"}
        counts = [history.modes()[-1] for history in chosen]
        axes.plot([h.width for h in chosen], counts, markersize=7, label=f"{SIDES[side]}, measured", **style)
        bounds = [history.bound for history in chosen]
        axes.plot(
            [h.width for h in chosen], bounds, markersize=7, fillstyle="none", label=f"{SIDES[side]}, bound", **style
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis, widths if axis is axes.xaxis else np.array([1.0, 1e3]))
    axes.set_xlabel("width of the factor")
    axes.set_ylabel("modes above largest / 33")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(plotted(title), fontsize=12, color=INK)
    return figure


def tuning(tuned: Tuned) -> Figure:
    """The result against the learning rate, one curve an optimizer with its own weight decay.

    The chosen trials have a ring, other weight decays stand beside the curve. What diverged or failed, or is so bad
    that it would flatten everything else, lies at the border.
    """
    figure = _figure(11, 5.4)
    axes = figure.subplots()
    contenders = tuned.contenders()
    shown = [trial for trial in tuned.trials if trial.value is not None and not _off_scale(tuned, trial.value)]
    for position, name in enumerate(contenders):
        mine = sorted((trial for trial in shown if trial.contender == name), key=lambda trial: trial.lr)
        lost = [trial for trial in tuned.of(name) if trial not in shown]
        chosen = tuned.best(name)  # of finals, which the picture has no room for, the ring is at the short trial
        best = [trial for trial in mine if chosen and (trial.lr, trial.decay) == (chosen.lr, chosen.decay)]
        look: dict[str, Any] = {"color": colour(position), "marker": MARKERS[position % len(MARKERS)]}
        line: dict[str, Any] = {"linestyle": dash(position), "linewidth": 1.7}
        _draw_trials(axes, [trial for trial in mine if trial.decay is None], **line, **look)
        _draw_trials(axes, [trial for trial in mine if trial.decay is not None], **look, **HOLLOW)
        _draw_trials(axes, best, **{**look, **HOLLOW, **RING})
        height = 0.02 + 0.03 * position  # one above the other, where several fail at one rate
        heights = [height if tuned.mode == "max" else 1 - height] * len(lost)
        border = axes.get_xaxis_transform()
        axes.plot([t.lr for t in lost], heights, transform=border, color=look["color"], clip_on=False, **CROSS)
    _scale_values([axes], tuned.metric, [trial.value for trial in shown])
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis, np.array([1.0, 1e3]))
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"{_axis_name(tuned.metric)} {tuned.judged()}")
    figure.suptitle(plotted(f"{tuned.workload}: learning rates"), fontsize=12, color=INK)
    _tuning_legend(figure, contenders, tuned.judged_again())
    return figure


def scaling(rows: Sequence[Measurement], slopes: Mapping[str, Mapping[str, float | None]], title: str) -> Figure:
    """Seconds of the refresh and of the application against the width of a layer, and the fitted powers of it."""
    figure = _figure(11, 4.8)
    grid = figure.subplots(1, 2)
    widths = sorted({row.width for row in rows})
    for axes, part in zip(grid, ("refresh", "application"), strict=True):
        _frame(axes)
        for position, (method, fitted) in enumerate(slopes.items()):
            mine = [row for row in rows if row.method == method]
            medians = np.array([getattr(row, part).median for row in mine])
            errors = np.array([[getattr(row, part).low for row in mine], [getattr(row, part).high for row in mine]])
            slope = fitted[part]
            axes.errorbar(
                [row.width for row in mine],
                medians,
                yerr=np.abs(errors - medians),
                color=colour(position),
                marker=MARKERS[position],
                linestyle=dash(position),
                linewidth=1.7,
                capsize=3,
                label=method if slope is None else f"{method}: width$^{{{slope:.2f}}}$",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(widths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _plain_ticks(axes.yaxis, np.array([getattr(row, part).median for row in rows]))
        axes.set_xlabel("width of the layer")
        axes.set_ylabel(f"seconds of one {part}")
        axes.legend(frameon=False, fontsize=9, loc="best")
    figure.suptitle(plotted(title), fontsize=12, color=INK)
    return figure


def _draw_trials(axes: Axes, trials: Sequence[Trial], **look: Any) -> None:
    axes.plot([trial.lr for trial in trials], np.array([trial.value for trial in trials], dtype=float), **look)


def _off_scale(tuned: Tuned, value: float) -> bool:
    """Whether a loss is so far from the best of all that its curve would be all there is to see."""
    best = min((trial.value for trial in tuned.trials if trial.value is not None), default=0.0)
    return tuned.mode == "min" and best > 0 and not value <= 30 * best


def _tuning_legend(figure: Figure, contenders: Sequence[str], decided: str) -> None:
    looks: list[tuple[str, dict[str, Any]]] = [
        (plotted(name), {"color": colour(n), "marker": MARKERS[n % len(MARKERS)], "linestyle": dash(n)})
        for n, name in enumerate(contenders)
    ]
    looks += [
        (f"chosen by its result\n{decided}" if decided else "chosen", {"color": INK, **HOLLOW, **RING}),
        ("another\nweight decay", {"color": INK, "marker": "s", **HOLLOW}),
        ("diverged, failed\nor off the scale", {"color": INK, **CROSS}),
    ]
    handles = [Line2D([], [], label=name, **look) for name, look in looks]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, labelspacing=0.9)


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.png and `stem`.svg; the same figure gives the same bytes each time."""
    disk.make_folder(stem.parent)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    details: dict[str, Any] = {"dpi": 150, "metadata": {"Software": None}}
    disk.write_atomically(png, lambda file: figure.savefig(file, format="png", **details))
    details = {"metadata": {"Date": None, "Creator": None}}
    disk.write_atomically(svg, lambda file: figure.savefig(file, format="svg", **details))
    return png, svg


def _usable(epoch: dict[str, Any], quantity: str) -> bool:
    value = epoch.get(quantity)
    return value is not None and math.isfinite(value)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_band(axes: Axes, data: Band, position: int) -> None:
    shade = colour(position)
    line: dict[str, Any] = {"color": shade, "linestyle": dash(position), "linewidth": 1.7}
    lonely: dict[str, Any] = {"marker": MARKERS[position % len(MARKERS)], "markersize": 4} if len(data.x) == 1 else {}
    axes.plot(data.x, data.middle, zorder=3, **line, **lonely)
    if (data.high > data.low).any():
        axes.fill_between(data.x, data.low, data.high, color=shade, alpha=0.15, linewidth=0, zorder=2)


def _draw_arrival(axes: Axes, pair: Promise, measure: str, position: int) -> None:
    """From where the baseline was best to where the K-FAC was as good, as medians over the seeds, as the curves are."""
    height = np.median([arrival.best for arrival in pair.arrivals])
    start = np.median([getattr(arrival.baseline, measure) for arrival in pair.arrivals])
    end = np.median([getattr(arrival.kfac, measure) for arrival in pair.arrivals])
    look: dict[str, Any] = {
        "arrowstyle": "-|>",
        "color": colour(position),
        "linewidth": 1.4,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.plot([start], [height], color=colour(position), marker="|", markersize=9, markeredgewidth=1.4, zorder=4)
    axes.annotate("", xy=(end, height), xytext=(start, height), arrowprops=look, zorder=4)


def _decorate_spectrum(axes: Axes, history: FactorHistory, logarithmic: bool) -> None:
    _frame(axes)
    axes.set_yscale("log")
    axes.set_ylim(1e-6, 2)
    axes.axhline(10**-1.5, color=INK, linewidth=1, linestyle="--")
    if logarithmic:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, np.array([1.0, history.width]))
    bound = f"allows all {history.width}"
    if history.bound < history.width:
        axes.axvline(history.bound, color=PALETTE[1], linewidth=1.2, linestyle=":")
        bound = f"allows {history.bound}"
    said = f"above largest / 33 at the end: {history.modes()[-1]} modes (Proposition 3.1 {bound})"
    axes.set_title(said, fontsize=8.5, color=INK, loc="left")
    name = f"{history.layer}: {SIDES[history.side]}, width {history.width}"
    axes.text(0, 1.12, plotted(name), transform=axes.transAxes, fontsize=10.5, color=INK, weight="bold")


def _scale_values(row: Sequence[Axes], quantity: str, values: Sequence[float | None]) -> None:
    usable = np.array([value for value in values if value is not None and math.isfinite(value)], dtype=float)
    for axes in row:
        _frame(axes)
        if quantity.endswith("accuracy"):
            _accuracy_scale(axes, usable)
        elif usable.size and usable.min() > 0 and usable.max() > 3 * usable.min():
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis, usable)


def _accuracy_scale(axes: Axes, values: np.ndarray) -> None:
    """Accuracy spaced as the logarithm of the error: 90, 99 and 99.9 per cent are equally far apart."""
    floor = 1e-4

    def forward(accuracy: Any) -> Any:
        return -np.log10(np.maximum(1 - np.asarray(accuracy, dtype=float), floor))

    def inverse(height: Any) -> Any:
        return 1 - 10 ** -np.asarray(height, dtype=float)

    axes.set_yscale(FuncScale(axes.yaxis, (forward, inverse)))
    if not values.size:
        return
    low, high = float(values.min()), min(float(values.max()), 1 - floor)
    margin = 0.05 * (forward(high) - forward(low)) + 0.01
    axes.set_ylim(max(0.0, float(inverse(forward(low) - margin))), float(inverse(forward(high) + margin)))
    axes.yaxis.set_major_locator(FixedLocator(_spaced(forward, low, high)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def _spaced(forward: Callable[[float], Any], low: float, high: float) -> list[float]:
    """Round accuracies inside [low, high], the roundest first, none closer to another than a twelfth of the axis."""
    wanted = [0.5, 0.9, 0.99, 0.95, 0.97, 0.8, 0.98, 0.7, 0.999, 0.6, 0.3, 0.4, 0.2, 0.85, 0.92, 0.995, 0.94, 0.96, 0.1]
    wanted += [percent / 100 for percent in range(1, 100)]  # for axes that lie between the roundest ones
    gap = float(forward(high) - forward(low)) / 12
    kept: list[float] = []
    for tick in wanted:
        if low <= tick <= high and all(abs(float(forward(tick) - forward(other))) >= gap for other in kept):
            kept.append(tick)
    return sorted(kept)


def _scale_seconds(axes: Axes, runs: Sequence[Run]) -> None:
    """Logarithmic seconds when the slowest optimizer took so long that the others would be squeezed to the left."""
    ends = [float(run.epochs[-1]["train_seconds"]) for run in runs if run.epochs]
    starts = [float(run.epochs[0]["train_seconds"]) for run in runs if run.epochs]
    if ends and min(starts) > 0 and max(ends) > 3 * min(ends):
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, np.array([min(starts), max(ends)]))


def _plain_ticks(axis: Any, values: np.ndarray) -> None:
    """Write 0.5 and 20 instead of powers of ten; label the 2s and 5s too when the range is short."""
    short = values.max() < 300 * values.min()
    plain = FuncFormatter(lambda value, _: f"{value:g}")

    def some(value: float, _: Any) -> str:
        leading = round(value / 10 ** math.floor(math.log10(value)), 6)
        return f"{value:g}" if leading in (2, 5) else ""

    axis.set_major_formatter(plain)
    axis.set_minor_formatter(FuncFormatter(some) if short else NullFormatter())


def _frame(axes: Axes) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, labelbottom=True)


def _axis_name(quantity: str) -> str:
    names = {"test_accuracy": "test accuracy", "test_loss": "test loss", "train_loss": "training loss"}
    return names.get(quantity, plotted(metric_name(quantity)))


def _title(runs: Sequence[Run]) -> str:
    workload = workload_of(runs[0]) if runs else ""
    seeds = len({run.config.get("seed", run.summary.get("seed")) for run in runs})
    return workload if seeds < 2 else f"{workload}: median over {seeds} seeds, band from the smallest to the largest"


def _legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    lines, names = axes.get_lines()[: len(labels)], [plotted(label) for label in labels]
    if not lines:
        return
    for columns in range(6, 0, -1):  # as many side by side as the picture is wide enough for
        legend = figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()

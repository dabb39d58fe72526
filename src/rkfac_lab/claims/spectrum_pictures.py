"""Modes against the width of a factor, and the curves of whole spectra."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from rkfac_lab.claims import drawing
from rkfac_lab.claims.looks import Series
from rkfac_lab.claims.widths import FAMILIES
from rkfac_lab.plots import SIDES
from rkfac_lab.spectrum import NEGLIGIBLE

Every = Mapping[tuple[str, str, str, int], Series]  # by family, layer, side and batch


def against_width(every: Every, step: int, rank: int) -> Figure:
    """One frame a side, one curve a layer and batch."""
    figure, panels = drawing.panels(
        2, across="width d of the factor", up=f"modes above a 33rd after {step} steps", same_height=True
    )
    for axes, side in zip(panels, SIDES, strict=True):
        drawn = [(key, series) for key, series in every.items() if key[2] == side]
        for position, ((family, layer, _, batch), series) in enumerate(drawn):
            label = f"{family}, {FAMILIES[family].layers[layer]}, batch {batch}"
            widths, modes = [f["d"] for f in series], [f["looks"][-1]["unbiased"] for f in series]
            axes.plot(widths, modes, **drawing.look(position, marked=True), label=label)
        known = sorted({factor["d"] for _, series in drawn for factor in series})
        axes.plot(known, known, color="#bbbbbb", linewidth=0.9, label="every mode")
        drawing.logarithmic(axes.xaxis)
        axes.set_xticks([2**power for power in range(3, 15) if known[0] <= 1.1 * 2**power <= 1.21 * known[-1]])
        drawing.logarithmic(axes.yaxis)
        drawing.note(axes, [(rank, f"the paper's rank, {rank}")])
        axes.set_title(SIDES[side])
    curves_drawn, labels = panels[0].get_legend_handles_labels()  # the second panel has the same
    figure.legend(curves_drawn, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return figure


def curves(every: Every, batch: int, step: int) -> Figure:
    """One frame a factor of this batch, one curve a width."""
    chosen = [(key, factors) for key, factors in every.items() if key[3] == batch]
    figure, panels = drawing.panels(len(chosen), across="mode", up="eigenvalue / largest", same_height=True)
    for axes, ((family, layer, side, _), factors) in zip(panels, chosen, strict=True):
        for position, factor in enumerate(factors):
            modes, values = zip(*factor["curve"], strict=True)
            axes.plot(modes, values, **drawing.look(position), label=f"width {factor['width']}, d = {factor['d']}")
        title = f"{family}, {FAMILIES[family].layers[layer]}, {SIDES[side]}, batch {batch}, step {step}"
        drawing.as_spectrum(axes, NEGLIGIBLE, "a 33rd", title)
    return figure

"""What the figures draw: checked on the artists, not on pixels."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from rkfac_lab import plots
from rkfac_lab.spectrum import FactorHistory

from .handmade import make_run


def three_seeds():
    return [
        make_run("k-fac", 1, accuracies=[0.5, 0.8, 0.9], epoch_seconds=[1.0, 1.0, 1.0], targets=[0.85]),
        make_run("k-fac", 2, accuracies=[0.6, 0.7, 0.97], epoch_seconds=[2.0, 2.0, 2.0], targets=[0.85]),
        make_run("k-fac", 3, accuracies=[0.4, 0.75, 0.95], epoch_seconds=[4.0, 4.0, 4.0], targets=[0.85]),
        make_run("sgd", 1, accuracies=[0.3, 0.4, 0.5], epoch_seconds=[0.1, 0.1, 0.1], targets=[0.85]),
    ]


def test_band_is_median_and_range_over_the_seeds():
    found = plots.band(three_seeds()[:3], "test_accuracy", "train_seconds")
    np.testing.assert_allclose(found.x, [2, 4, 6])
    np.testing.assert_allclose(found.middle, [0.5, 0.75, 0.95])
    np.testing.assert_allclose(found.low, [0.4, 0.7, 0.9])
    np.testing.assert_allclose(found.high, [0.6, 0.8, 0.97])


def test_a_diverged_seed_neither_shortens_nor_prolongs_the_curve():
    runs = [
        make_run("sgd", 1, accuracies=[0.5, 0.8, 0.9]),
        make_run("sgd", 2, accuracies=[0.1, float("nan")], status="diverged"),
    ]
    found = plots.band(runs, "test_accuracy", "epoch")
    np.testing.assert_allclose(found.x, [1, 2, 3])
    np.testing.assert_allclose(found.middle, [0.3, 0.8, 0.9])
    alone = plots.band(runs[1:], "test_accuracy", "epoch")
    np.testing.assert_allclose(alone.middle, [0.1])


def test_curves_draw_every_optimizer_in_its_colour_in_every_panel():
    figure = plots.curves(three_seeds())
    assert len(figure.axes) == 6  # accuracy, test loss, training loss x epochs, seconds
    for axes in figure.axes:
        assert [to_hex(line.get_color()).upper() for line in axes.get_lines()[:2]] == ["#0072B2", "#D55E00"]
    accuracy, against_seconds = figure.axes[:2]
    np.testing.assert_allclose(accuracy.get_lines()[0].get_ydata(), [0.5, 0.75, 0.95])
    np.testing.assert_allclose(against_seconds.get_lines()[0].get_xdata(), [2, 4, 6])
    assert accuracy.get_lines()[2].get_ydata()[0] == 0.85  # the target
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["k-fac", "sgd"]
    assert against_seconds.get_xscale() == "log"  # 12 s against 0.3 s


def test_a_legend_of_many_long_names_stays_inside_of_the_picture():
    runs = [make_run(f"a recipe with one more thing changed, number {n}") for n in range(14)]
    figure = plots.curves(runs)
    figure.draw_without_rendering()
    taken = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == 14
    assert taken.x0 >= 0
    assert taken.x1 <= figure.bbox.x1


def test_accuracies_of_nought_and_one_can_be_drawn():
    figure = plots.curves([make_run("sgd", accuracies=[0.0, 0.5, 1.0])])
    low, high = figure.axes[0].get_ylim()
    assert low == 0.0
    assert 0.999 < high < 1.0
    figure.canvas.draw()


def test_a_comparison_without_a_single_epoch_still_gives_a_figure(tmp_path):
    figure = plots.curves([make_run("sgd", accuracies=[], status="diverged")])
    png, _ = plots.save(figure, tmp_path / "curves")
    assert png.stat().st_size > 0


def test_saved_files_are_png_and_svg_with_the_dots_of_the_name_kept(tmp_path):
    png, svg = plots.save(plots.curves(three_seeds()), tmp_path / "new" / "v1.2-curves")
    assert png.name == "v1.2-curves.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text(encoding="utf-8")


def history(layer: str, side: str, values: list[list[float]], bound: int) -> FactorHistory:
    return FactorHistory(
        layer, side, len(values[0]), bound, steps=[30 * i for i in range(len(values))], eigenvalues=values
    )


def test_spectra_are_relative_with_the_line_and_the_bound():
    decaying = [10.0**-i for i in range(6)]
    figure = plots.spectra(
        [history("fc", "input", [[1.0] * 6, decaying], bound=4), history("fc", "output", [[8.0, 2.0]], bound=2)], "t"
    )
    left, right = figure.axes[:2]
    np.testing.assert_allclose(left.get_lines()[1].get_ydata(), decaying)
    np.testing.assert_allclose(right.get_lines()[0].get_ydata(), [1.0, 0.25])
    assert left.get_lines()[2].get_ydata()[0] == pytest.approx(10**-1.5)
    assert left.get_lines()[3].get_xdata()[0] == 4  # the bound bites
    assert len(right.get_lines()) == 2  # here it does not, and no line is drawn
    assert "at the end: 2 modes (Proposition 3.1 allows 4)" in left.get_title(loc="left")


def test_modes_against_width_puts_counts_over_widths():
    figure = plots.modes_against_width(
        [
            history("a", "input", [[1.0, 0.5, 0.001]], bound=3),
            history("b", "input", [[1.0, 0.5, 0.04, 0.01, 0.0]], bound=4),
            history("a", "output", [[1.0, 1.0]], bound=2),
        ],
        "t",
    )
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    measured = lines["input factor A, measured"]
    np.testing.assert_array_equal(measured.get_xdata(), [3, 5])
    np.testing.assert_array_equal(measured.get_ydata(), [2, 3])
    np.testing.assert_array_equal(lines["input factor A, bound"].get_ydata(), [3, 4])
    np.testing.assert_array_equal(lines["output factor Γ, measured"].get_ydata(), [2])


def test_no_two_of_many_lines_look_alike():
    looks = {(plots.colour(n), str(plots.dash(n))) for n in range(2 * len(plots.PALETTE))}
    assert len(looks) == 2 * len(plots.PALETTE)

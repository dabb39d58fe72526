"""The HTML page in a real browser: what is drawn, and what clicking, keys and dragging change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from rkfac_lab import report
from rkfac_lab.record import Run

from .chromium import CHROMIUM, DRIVER, Page, comparison, records, start_chromium
from .handmade import make_run

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="the page is looked at in Debian's chromium, which is not installed with its driver",
)
HOSTILE = "<img src=x onerror=\"document.title='broken in'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    driver = start_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Callable[[Sequence[Run]], Page]]:
    """Open the page on some runs; afterwards the console must be empty and nothing may have been fetched."""

    def opened(runs: Sequence[Run]) -> Page:
        browser.get(report.write(runs, tmp_path / "page.html").as_uri())
        return Page(browser)

    yield opened
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert browser.get_log("browser") == []
    assert fetched == []


Show = Callable[[Sequence[Run]], Page]


def test_one_curve_an_optimizer_with_its_band_axes_and_targets(show: Show) -> None:
    page = show(comparison())
    assert list(page.curves()) == ["k-fac", "sgd", "adamw"]
    assert len(page.all("#curves path.band")) == 3
    assert page.texts("#curves .x-title") == ["Epoch"]
    assert page.texts("#curves .y-title")[0].startswith("Test accuracy")
    assert page.texts("#curves .rules text") == ["95 %", "80 %"]
    assert page.texts("#legend button") == ["k-fac", "sgd", "adamw"]
    assert page.one("#title").text == "digits-mlp"
    assert page.one("#compared").text == "k-fac, sgd, adamw compared over 2 seeds: 6 runs (6 finished)."
    assert page.texts(".card .value") == ["adamw", "k-fac", "adamw"]
    assert page.texts("#warnings li") == []


def test_toggles_change_what_is_drawn(show: Show) -> None:
    page = show(comparison())
    drawn = [page.curves()]
    for name, value in (("Against", "seconds"), ("Shown", "test_loss"), ("Scale", "linear")):
        page.press(name, value)
        drawn.append(page.curves())
        assert page.one(f"[aria-label='{name}'] [data-value='{value}']").get_attribute("aria-pressed") == "true"
    for earlier, later in pairwise(drawn):
        assert all(earlier[name] != later[name] for name in earlier)
    assert page.texts("#curves .x-title") == ["Training seconds"]
    assert page.texts("#curves .y-title") == ["Test loss"]
    assert page.texts("#curves .rules text") == []  # the targets are of another metric
    page.press("Time scale", "log")
    assert page.texts("#curves .x-title") == ["Training seconds (log scale)"]
    page.press("Seeds", "each")
    assert len(page.curves()) == 6
    assert page.all("#curves path.band") == []


def test_against_seconds_curves_are_placed_by_their_time(show: Show) -> None:
    page = show(comparison())
    page.press("Against", "seconds")

    def last_x(path: str) -> float:
        return float(path.split("L")[-1].split()[0])

    drawn = page.curves()
    left, right = (float(page.one("#curves line.axis:last-of-type").get_attribute(end) or 0) for end in ("x1", "x2"))
    for name, seconds in (("k-fac", 6.0), ("sgd", 3.0), ("adamw", 1.5)):  # the axis goes from 0 to 6 seconds
        assert last_x(drawn[name]) == pytest.approx(left + (right - left) * seconds / 6, abs=0.1)


def test_the_scale_spaces_values_as_it_says(show: Show) -> None:
    page = show(comparison())

    def steps(values: Sequence[float]) -> list[float]:
        return [later - earlier for earlier, later in pairwise(values)]

    def heights() -> list[float]:
        return [float(point.split()[1]) for point in page.curves()["sgd"].lstrip("M").split("L")]

    assert {"50 %", "80 %", "90 %", "95 %"} <= set(page.ticks())
    page.press("Scale", "linear")
    on_linear = steps([float(tick.split()[0]) for tick in page.ticks()])
    assert on_linear == pytest.approx([on_linear[0]] * len(on_linear))
    page.press("Shown", "train_loss")  # which halves from epoch to epoch
    first, second = steps(heights())
    assert first == pytest.approx(2 * second, rel=0.01)
    page.press("Scale", "log")
    first, second = steps(heights())
    assert first == pytest.approx(second, rel=0.01)


def test_the_legend_hides_and_shows(show: Show) -> None:
    page = show(comparison())
    page.click("#legend button:nth-child(2)")
    assert list(page.curves()) == ["k-fac", "adamw"]
    assert page.one("#legend button:nth-child(2)").get_attribute("aria-pressed") == "false"
    page.click("#legend button:nth-child(1)")
    page.click("#legend button:nth-child(3)")
    assert page.curves() == {}
    assert "choose an optimizer" in page.one("#curves").text
    page.click("#legend button:nth-child(2)")
    assert list(page.curves()) == ["sgd"]


def test_keys_work_as_well_as_the_mouse(show: Show) -> None:
    page = show(comparison())
    second = page.one("[aria-label='Against'] [data-value='seconds']")
    page.browser.execute_script("arguments[0].focus()", second)
    ActionChains(page.browser).send_keys(Keys.SPACE).perform()
    assert page.texts("#curves .x-title")[0].startswith("Training seconds")
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("data-value") == "seconds"  # redrawing does not lose the place
    page.press("Against", "epoch")
    page.browser.execute_script("document.querySelector('#curves svg').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 2"]
    assert page.shown_values() == {"k-fac": "90.00 %", "sgd": "61.50 %", "adamw": "85.00 %"}
    ActionChains(page.browser).send_keys(Keys.ESCAPE).perform()
    assert page.shown_values() == {}


def test_pointing_reads_the_exact_values(show: Show) -> None:
    page = show(comparison())
    picture = page.one("#curves svg")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    right = picture.size["width"] // 2 - 70
    ActionChains(page.browser).move_to_element_with_offset(picture, right, 0).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 3"]
    assert page.shown_values() == {"k-fac": "97.50 %", "sgd": "85.00 %", "adamw": "96.50 %"}
    assert "97.00 % to 98.00 % · epoch 3 · 6 s" in page.texts("#curves .tip small")
    ActionChains(page.browser).move_to_element(page.one("#title")).perform()
    assert page.shown_values() == {}


def test_among_many_runs_those_nearest_to_the_pointer_are_read(show: Show) -> None:
    page = show([make_run("sgd", seed, accuracies=(seed / 20, seed / 20)) for seed in range(1, 16)])
    page.press("Seeds", "each")
    picture = page.one("#curves svg")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    ActionChains(page.browser).move_to_element_with_offset(picture, 0, -picture.size["height"] // 2 + 35).perform()
    assert list(page.shown_values()) == [f"sgd, seed {seed}" for seed in range(6, 16)]
    assert page.texts("#curves .tip .at")[-1] == "and 5 more"


def test_dragging_zooms_and_the_button_goes_back(show: Show) -> None:
    page = show(comparison())
    before = page.ticks()
    assert page.all("#reset-zoom") == []
    picture = page.one("#curves svg")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    drag = ActionChains(page.browser).move_to_element_with_offset(picture, 100, -150).click_and_hold()
    drag.move_by_offset(250, 60).release().perform()
    assert page.ticks() != before
    page.click("#reset-zoom")
    assert page.ticks() == before


def test_the_table_shows_the_numbers_and_sorts(show: Show) -> None:
    page = show(comparison())
    assert page.column(1) == ["k-fac", "sgd", "adamw"]
    assert page.column(2) == ["4.00 ± 0.00", "3.00 ± 0.00", "1.00 ± 0.00"]
    assert page.column(3) == ["6.00 ± 0.00", "–", "1.50 ± 0.00"]
    assert page.column(5) == ["2 of 2", "0 of 2", "2 of 2"]
    assert page.column(6) == ["18 ± 0", "–", "18 ± 0"]
    assert page.column(7) == ["9.00 ± 0.00", "–", "2.25 ± 0.00"]
    assert page.column(8) == ["97.50 ± 0.71", "85.00 ± 0.00", "96.50 ± 0.71"]
    kfac_best, adamw_best = (
        ["18 ± 0", "97.50 ± 0.71"],
        [
            *("1.00 ± 0.00", "1.50 ± 0.00", "0.500 ± 0.000"),
            *("18 ± 0", "2.25 ± 0.00"),
        ],
    )
    assert page.texts("#table td.best") == kfac_best + adamw_best
    heading = "#table thead tr:last-child th:nth-child(3) button"
    page.click(heading)
    assert page.column(1) == ["adamw", "k-fac", "sgd"]
    page.click(heading)
    assert page.column(1) == ["k-fac", "adamw", "sgd"]  # what has no number stays last
    assert page.one("#table thead tr:last-child th:nth-child(3)").get_attribute("aria-sort") == "descending"
    page.click("#table thead tr:last-child th:nth-child(1) button")
    assert page.column(1) == ["adamw", "k-fac", "sgd"]


def test_one_lucky_run_is_not_the_best(show: Show) -> None:
    lucky = [
        make_run("lucky", 1, accuracies=(0.9,), targets=(0.8,)),
        make_run("lucky", 2, accuracies=(0.1,), targets=(0.8,)),
    ]
    steady = [make_run("steady", seed, accuracies=(0.7, 0.9), targets=(0.8,)) for seed in (1, 2)]
    page = show([*lucky, *steady])
    assert page.column(2) == ["1.001 of 2 runs", "2.00 ± 0.00"]  # the second line of the cell says how few
    assert page.texts("#table td.best:nth-child(2)") == ["2.00 ± 0.00"]
    assert page.texts(".card:first-child div") == [
        "Fastest to accuracy ≥ 80 %",
        "steady",
        "2 s, reached by 2 of 2 runs",
    ]


def test_layers_follow_the_chosen_run_and_layer(show: Show) -> None:
    page = show(comparison())
    runs = [option.text for option in Select(page.one("#layer-run")).options]
    assert runs == ["k-fac, seed 1", "k-fac, seed 2"]  # the others have nothing to say
    assert [option.text for option in Select(page.one("#layer-name")).options] == ["first", "second"]
    assert page.texts("#layer-charts h3") == ["Rank kept", "Share of the trace captured", "Damping", "Clip factor"]
    rank = "[data-chart='Rank kept']"
    before = page.curves(rank)
    assert list(before) == ["Input factor", "Output factor"]
    assert list(page.curves("[data-chart='Clip factor']")) == ["Clip factor"]
    page.choose("#layer-name", "second")
    assert page.curves(rank) != before
    assert page.texts("#layer-table tr.chosen td")[:5] == ["second", "Linear", "65 / 32", "60 / 15", "90.0 % / 96.7 %"]
    page.click("#layer-table tbody tr:nth-child(1) button")
    assert page.curves(rank) == before
    page.choose("#layer-run", "k-fac, seed 2")
    assert page.one("#layer-run").get_attribute("value") == "1"
    assert page.texts("#uncovered li") == ["norm (LayerNorm): the pattern excludes it"]


def test_bars_are_as_long_as_the_seconds(show: Show) -> None:
    page = show(comparison())

    def widths(within: str, row: str) -> dict[str, float]:
        bars = page.all(f"{within} rect[data-row='{row}']")
        return {str(bar.get_attribute("data-phase")): float(str(bar.get_attribute("width"))) for bar in bars}

    layer_bars = widths("#layer-phases", "first")
    assert layer_bars["refresh"] == pytest.approx(3 * layer_bars["statistics"])
    assert layer_bars["apply"] == pytest.approx(2 * layer_bars["statistics"])
    # Of k-fac's 2 s an epoch its two layers spend 2 * (0.1 + 0.3 + 0.2); sgd's 1 s is all rest.
    kfac, sgd = widths("#phases", "k-fac"), widths("#phases", "sgd")
    assert kfac["refresh"] / sum(kfac.values()) == pytest.approx(0.3)
    assert kfac["rest"] / sum(kfac.values()) == pytest.approx(0.4)
    assert sgd["rest"] == pytest.approx(sum(kfac.values()) / 2)
    assert sgd["statistics"] == sgd["refresh"] == sgd["apply"] == 0


def test_without_layers_their_panels_are_away(show: Show) -> None:
    page = show([make_run("sgd")])
    assert not page.one("#layers").is_displayed()
    assert not page.one("#time").is_displayed()


def test_run_details_open(show: Show) -> None:
    run = replace(comparison()[1], config={"optimizer": {"name": "sgd", "arguments": {"lr": 0.25}}})
    page = show([run])
    assert not page.all("details.run pre")[0].is_displayed()
    page.click("details.run > summary")
    assert page.texts("details.run li") == [
        "accuracy ≥ 80 %: reached after 3 s, in epoch 3",
        "accuracy ≥ 95 %: not reached",
    ]
    page.browser.execute_script("document.querySelector('details.run details summary').click()")
    assert '"lr": 0.25' in page.all("details.run pre")[0].text


def test_a_run_that_diverged_at_once_is_said_and_breaks_nothing(show: Show) -> None:
    page = show([make_run("sgd"), make_run("wild", accuracies=(), status="diverged")])
    assert page.texts("#warnings li") == ["wild-1: diverged after 0 evaluations."]
    assert page.column(1) == ["sgd", "wild"]
    assert page.all("#curves path.curve")[0].get_attribute("data-name") == "sgd"


def test_hostile_text_is_shown_as_text(show: Show) -> None:
    run = make_run(HOSTILE, workload=HOSTILE, accuracies=(0.5, 0.9), targets=(0.8,))
    run = replace(run, config={"note": HOSTILE}, layers=records((HOSTILE,), 2), environment={"processor": HOSTILE})
    page = show([run])
    page.browser.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.all("img") == []
    assert page.browser.title == HOSTILE
    assert page.one("#title").text == HOSTILE
    assert page.texts("#legend button") == page.column(1) == [HOSTILE]
    assert HOSTILE in page.texts("#layer-table td")
    assert HOSTILE in page.texts("#facts dd")


def test_the_policy_stops_a_script_that_got_in(browser: webdriver.Chrome, tmp_path: Path) -> None:
    browser.get(report.write([make_run("sgd")], tmp_path / "page.html").as_uri())
    bad = "<button id=bad onclick='window.brokenIn = true'>"
    browser.execute_script(
        f'document.body.insertAdjacentHTML("beforeend", "{bad}"); document.getElementById("bad").click()'
    )
    assert browser.execute_script("return window.brokenIn") is None
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_what_became_of_the_promise_stands_at_the_top(show: Show) -> None:
    page = show([make_run("sgd", accuracies=(0.5, 0.9)), make_run("rs-kfac+sgd", accuracies=(0.9, 0.9))])
    assert page.texts("#promises li") == [
        "With sgd's own numbers rs-kfac reached sgd's best test accuracy (90%) after 0.50 of its steps "
        "and 0.50 of its seconds (1 of 1 seed)."
    ]
    assert show(comparison()).texts("#promises li") == []


def test_several_workloads_are_chosen_between(show: Show) -> None:
    autoencoder = make_run(
        "adamw", metric="test_error", mode="min", accuracies=(14, 9), targets=(10,), workload="autoencoder"
    )
    page = show([make_run("sgd"), autoencoder])
    page.press("Workload", "1")
    assert page.one("#title").text == "autoencoder"
    assert page.texts("#curves .y-title") == ["Test error (log scale)"]
    assert list(page.curves()) == ["adamw"]
    assert page.texts("#curves .rules text") == ["10"]


def test_narrow_and_dark_screens(show: Show, browser: webdriver.Chrome) -> None:
    page = show(comparison())
    paper = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(paper) == "rgb(255, 255, 255)"
    metrics = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    try:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        redrawn = "return document.querySelector('#curves svg').viewBox.baseVal.width"
        assert (
            browser.execute_async_script(
                f"const [done] = arguments; setTimeout(() => done((() => {{ {redrawn} }})()), 200)"
            )
            <= 360
        )
        assert browser.execute_script(paper) == "rgb(20, 23, 27)"
        assert list(page.curves()) == ["k-fac", "sgd", "adamw"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

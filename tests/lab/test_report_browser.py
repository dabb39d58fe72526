"""The HTML page in a real browser: what is drawn, and what clicking, keys and dragging change."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from rkfac_lab import report, table_text, tables
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
    assert page.bands() == 3
    assert page.texts("#curves .x-title") == ["Training seconds"]  # what an optimizer costs comes first
    assert page.texts("#curves .y-title")[0].startswith("Test accuracy")
    assert page.rules() == ["95 %", "80 %"]
    assert page.texts("#legend button") == ["k-fac", "sgd", "adamw"]
    assert page.one("#title").text == "digits-mlp"
    assert page.one("#compared").text == "k-fac, sgd, adamw compared over 2 seeds: 6 runs (6 finished)."
    assert page.texts(".card .value") == ["adamw", "k-fac", "adamw"]
    assert page.texts("#warnings li") == []


def test_what_is_written_down_as_svg_is_painted_on_the_canvas(show: Show) -> None:
    page = show(comparison())
    before = [page.painted(slot) for slot in range(3)]
    assert min(before) > 50
    assert page.painted(3) == 0  # nobody has the fourth colour
    page.click("#legend button:nth-child(2)")
    after = [page.painted(slot) for slot in range(3)]
    assert after[1] == 0
    assert min(after[0], after[2]) > 50


def test_toggles_change_what_is_drawn(show: Show) -> None:
    page = show(comparison())
    drawn = [page.curves()]
    toggles = (("Against", "cpu_seconds"), ("Against", "step"), ("Against", "epoch"), ("Shown", "test_loss"))
    for name, value in (*toggles, ("Scale", "linear")):
        page.press(name, value)
        drawn.append(page.curves())
        assert page.one(f"[aria-label='{name}'] [data-value='{value}']").get_attribute("aria-pressed") == "true"
    assert all(earlier != later for earlier, later in pairwise(drawn[1:]))
    assert page.texts("#curves .x-title") == ["Epoch"]
    assert page.texts("#curves .y-title") == ["Test loss"]
    assert page.rules() == []  # the targets are of another metric
    page.press("Against", "cpu_seconds")
    page.press("Time scale", "log")
    assert page.texts("#curves .x-title") == ["CPU seconds of training (log scale)"]
    page.press("Seeds", "each")
    assert len(page.curves()) == 6
    assert page.bands() == 0


def test_against_seconds_curves_are_placed_by_their_time(show: Show) -> None:
    page = show(comparison())
    over = page.one("#curves .u-over")
    width = over.size["width"]
    left = float(page.browser.execute_script("return arguments[0].offsetLeft", over))
    for axis, longest in (("seconds", 6.0), ("cpu_seconds", 9.0)):  # the axis goes from 0 to the slowest's last
        page.press("Against", axis)
        drawn = page.curves()
        for name, share in (("k-fac", 1.0), ("sgd", 0.5), ("adamw", 0.25)):
            assert drawn[name][-1][0] == pytest.approx(left + width * share, abs=0.6), (name, longest)


def test_the_scale_spaces_values_as_it_says(show: Show) -> None:
    page = show(comparison())

    def steps(values: Sequence[float]) -> list[float]:
        return [later - earlier for earlier, later in pairwise(values)]

    def heights() -> list[float]:
        return [y for _, y in page.curves()["sgd"]]

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


def test_equal_curves_are_said_and_seen(show: Show) -> None:
    twins = [make_run(name, seed, epoch_seconds=(2, 2)) for name in ("rs-kfac", "rs-kfac+sgd") for seed in (1, 2)]
    other = make_run("sgd", accuracies=(0.5, 0.8))
    page = show([*twins, other])
    said = "rs-kfac and rs-kfac+sgd have exactly the same test accuracy at every evaluation."
    assert page.one("#equal").text == said
    page.press("Against", "step")
    assert page.one("#equal").text == f"{said} Where one lies on the other, the lower one is drawn wider."
    drawn = {part.get("data-name"): part for part in page.svg() if part.get("class") == "curve"}
    lower, upper = drawn["rs-kfac"], drawn["rs-kfac+sgd"]
    assert lower.get("points") == upper.get("points")
    assert float(str(lower.get("stroke-width"))) >= 2 * float(str(upper.get("stroke-width")))
    assert lower.get("stroke-dasharray") != upper.get("stroke-dasharray")
    assert min(page.painted(0), page.painted(1)) > 50
    page.click("#legend button:nth-child(1)")
    assert page.one("#equal").text == ""


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
    second = page.one("[aria-label='Against'] [data-value='step']")
    page.browser.execute_script("arguments[0].focus()", second)
    ActionChains(page.browser).send_keys(Keys.SPACE).perform()
    assert page.texts("#curves .x-title") == ["Step"]
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("data-value") == "step"  # redrawing does not lose the place
    page.press("Against", "epoch")
    page.browser.execute_script("document.querySelector('#curves .plot').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 2"]
    assert page.shown_values() == {"k-fac": "90.00 %", "sgd": "61.50 %", "adamw": "85.00 %"}
    ActionChains(page.browser).send_keys(Keys.ESCAPE).perform()
    assert page.shown_values() == {}


def test_pointing_reads_the_exact_values(show: Show) -> None:
    page = show(comparison())
    page.press("Against", "epoch")
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    right = picture.size["width"] // 2 - 10
    ActionChains(page.browser).move_to_element_with_offset(picture, right, 0).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 3"]
    assert page.shown_values() == {"k-fac": "97.50 %", "sgd": "85.00 %", "adamw": "96.50 %"}
    assert "97.00 % to 98.00 % · 6 s · step 18 · epoch 3" in page.texts("#curves .tip small")
    ActionChains(page.browser).move_to_element(page.one("#title")).perform()
    assert page.shown_values() == {}


def test_among_many_runs_those_nearest_to_the_pointer_are_read(show: Show) -> None:
    page = show([make_run("sgd", seed, accuracies=(seed / 20, seed / 20)) for seed in range(1, 16)])
    page.press("Seeds", "each")
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    ActionChains(page.browser).move_to_element_with_offset(picture, 0, -picture.size["height"] // 2 + 5).perform()
    assert list(page.shown_values()) == [f"sgd, seed {seed}" for seed in range(6, 16)]
    assert page.texts("#curves .tip .at")[-1] == "and 5 more"


def test_dragging_zooms_and_the_button_goes_back(show: Show) -> None:
    page = show(comparison())
    before, whole = page.ticks(), page.curves()
    assert not page.one("#reset-zoom").is_displayed()
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    drag = ActionChains(page.browser).move_to_element_with_offset(picture, 100, -150).click_and_hold()
    drag.move_by_offset(250, 60).release().perform()
    assert page.ticks() != before
    # What was 250 pixels is the whole width now.
    width = picture.size["width"]
    here = [x for x, _ in page.curves()["k-fac"]]
    then = [x for x, _ in whole["k-fac"]]
    assert (here[2] - here[1]) / (then[2] - then[1]) == pytest.approx(width / 250, rel=0.02)
    page.click("#reset-zoom")
    assert page.ticks() == before
    assert page.curves() == whole


def test_the_table_shows_the_numbers_and_sorts(show: Show) -> None:
    page = show(comparison())
    assert page.texts("#table thead tr:last-child th") == [
        *("Optimizer", "≥ 80 %", "≥ 95 %", "Seconds per epoch", "Best test accuracy, %")
    ]
    assert page.column(1) == ["k-fac", "sgd", "adamw"]
    assert page.lines(2) == [
        ["4.00 ± 0.00", "6.00 ± 0.00 CPU s", "12 ± 0 steps"],
        ["3.00 ± 0.00", "4.50 ± 0.00 CPU s", "18 ± 0 steps"],
        ["1.00 ± 0.00", "1.50 ± 0.00 CPU s", "12 ± 0 steps"],
    ]
    assert page.lines(3) == [
        ["6.00 ± 0.00", "9.00 ± 0.00 CPU s", "18 ± 0 steps"],
        ["–", "0 of 2 runs"],
        ["1.50 ± 0.00", "2.25 ± 0.00 CPU s", "18 ± 0 steps"],
    ]
    assert page.column(5) == ["97.50 ± 0.71", "85.00 ± 0.00", "96.50 ± 0.71"]
    best = [cell.text.splitlines()[0] for cell in page.all("#table td.best")]
    assert best == ["97.50 ± 0.71", "1.00 ± 0.00", "1.50 ± 0.00", "0.500 ± 0.000"]
    heading = "#table thead tr:last-child th:nth-child(3) button"
    page.click(heading)
    assert page.column(1) == ["adamw", "k-fac", "sgd"]
    page.click(heading)
    assert page.column(1) == ["k-fac", "adamw", "sgd"]  # what has no number stays last
    assert page.one("#table thead tr:last-child th:nth-child(3)").get_attribute("aria-sort") == "descending"
    page.click("#table thead tr:last-child th:nth-child(1) button")
    assert page.column(1) == ["adamw", "k-fac", "sgd"]


def test_ratios_are_to_the_best_baseline_or_to_the_row_chosen(show: Show) -> None:
    page = show(comparison())
    assert Select(page.one("#reference")).first_selected_option.text == "adamw"
    first = page.lines(2, "#ratios")
    assert first == [
        ["4.00", "CPU 4.00", "steps 1.00"],
        ["3.00", "CPU 3.00", "steps 1.50"],
        ["1.00", *("CPU 1.00", "steps 1.00")],
    ]
    assert page.lines(3, "#ratios")[1] == ["–"]
    page.choose("#reference", "k-fac")
    assert page.lines(2, "#ratios")[2] == ["0.25", "CPU 0.25", "steps 1.00"]
    assert page.column(4, "#ratios") == ["1.00", "0.50", "0.25"]


def test_one_lucky_run_is_not_the_best(show: Show) -> None:
    lucky = [
        make_run("lucky", 1, accuracies=(0.9,), targets=(0.8,)),
        make_run("lucky", 2, accuracies=(0.1,), targets=(0.8,)),
    ]
    steady = [make_run("steady", seed, accuracies=(0.7, 0.9), targets=(0.8,)) for seed in (1, 2)]
    page = show([*lucky, *steady])
    assert page.lines(2)[0] == ["1.00", "1 of 2 runs", "1.50 CPU s", "6 steps"]
    assert page.lines(2)[1][0] == "2.00 ± 0.00"
    assert [cell.text.splitlines()[0] for cell in page.all("#table td.best:nth-child(2)")] == ["2.00 ± 0.00"]
    assert page.texts(".card:first-child div") == [
        "Fastest to accuracy ≥ 80 %",
        "steady",
        "2 s, 12 steps, reached by 2 of 2 runs",
    ]


def test_layers_follow_the_chosen_run_and_layer(show: Show) -> None:
    page = show(comparison())
    runs = [option.text for option in Select(page.one("#layer-run")).options]
    assert runs == ["k-fac, seed 1", "k-fac, seed 2"]  # the others have nothing to say
    assert [option.text for option in Select(page.one("#layer-name")).options] == [
        "first Linear 32×65",
        "second Linear 32×65",
    ]
    assert page.texts("#layer-charts h3") == ["Rank kept", "Share of the trace captured", "Damping", "Clip factor"]
    assert "as a share of all eigenvalues" in page.one("[data-chart='Share of the trace captured'] .note").text
    rank = "[data-chart='Rank kept'] .chart"
    before = page.curves(rank)
    assert list(before) == ["Input factor", "Output factor"]
    assert list(page.curves("[data-chart='Clip factor'] .chart")) == ["Clip factor"]
    page.choose("#layer-name", "second Linear 32×65")
    assert page.curves(rank) != before
    assert page.texts("#layer-table tr.chosen td")[:3] == ["second Linear 32×65", "60 / 15", "90.0 % / 96.7 %"]
    page.click("#layer-table tbody tr:nth-child(1) button")
    assert page.curves(rank) == before
    page.choose("#layer-run", "k-fac, seed 2")
    assert page.one("#layer-run").get_attribute("value") == "1"
    assert page.texts("#uncovered li") == ["norm (LayerNorm): the pattern excludes it"]


def test_bars_are_as_long_as_the_seconds(show: Show) -> None:
    page = show(comparison())

    def widths(within: str, row: str) -> dict[str, float]:
        bars = page.all(f"{within} [data-row='{row}'] .bar")
        return {str(bar.get_attribute("data-phase")): float(bar.rect["width"]) for bar in bars}

    layer_bars = widths("#layer-phases", "first Linear 32×65")
    assert layer_bars["refresh"] == pytest.approx(3 * layer_bars["statistics"], rel=0.01)
    assert layer_bars["apply"] == pytest.approx(2 * layer_bars["statistics"], rel=0.01)
    # Of k-fac's 2 s an epoch its two layers spend 2 * (0.1 + 0.3 + 0.2); sgd's 1 s is all rest.
    kfac, sgd = widths("#phases", "k-fac"), widths("#phases", "sgd")
    assert kfac["refresh"] / sum(kfac.values()) == pytest.approx(0.3, rel=0.01)
    assert kfac["rest"] / sum(kfac.values()) == pytest.approx(0.4, rel=0.01)
    assert sgd["rest"] == pytest.approx(sum(kfac.values()) / 2, rel=0.01)
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
    assert '"lr": 0.25' in page.one("details.run details:first-of-type pre").text


def test_a_run_that_diverged_at_once_is_said_and_breaks_nothing(show: Show) -> None:
    page = show([make_run("sgd"), make_run("wild", accuracies=(), status="diverged")])
    assert page.texts("#warnings li") == ["wild-1: diverged after 0 evaluations."]
    assert page.column(1) == ["sgd", "wild"]
    assert list(page.curves()) == ["sgd"]


def test_hostile_text_is_shown_as_text(show: Show) -> None:
    run = make_run(HOSTILE, workload=HOSTILE, accuracies=(0.5, 0.9), targets=(0.8,))
    run = replace(run, config={"label": HOSTILE}, layers=records((HOSTILE,), 2), environment={"processor": HOSTILE})
    page = show([run])
    page.browser.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.all("img") == []
    assert page.browser.title == HOSTILE
    assert page.one("#title").text == HOSTILE
    assert page.texts("#legend button") == page.column(1) == [HOSTILE]
    assert f"{HOSTILE} Linear 32×65" in page.texts("#layer-table td")
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
    assert page.rules() == ["10"]


def test_runs_of_different_budgets_are_chosen_between_and_never_merged(show: Show) -> None:
    runs = [
        replace(make_run("sgd", seed, accuracies=(0.1, 0.2 * epochs)), config={"epochs": epochs})
        for epochs in (2, 4)
        for seed in (1, 2)
    ]
    page = show(runs)
    warning = (
        "Runs of this workload had different budgets (2 epochs; 4 epochs). They are shown apart: choose one above."
    )
    assert page.texts("#warnings b") == [warning]
    assert page.texts("#workloads button") == ["digits-mlp, 2 epochs", "digits-mlp, 4 epochs"]
    assert page.bands() == 0  # two equal seeds: a band would be of both budgets
    assert page.one("#compared").text == "sgd compared over 2 seeds: 2 runs (2 finished) of 2 epochs."
    assert page.column(3) == ["40.00 ± 0.00"]
    page.press("Workload", "1")
    assert page.texts("#warnings b") == [warning]
    assert page.column(3) == ["80.00 ± 0.00"]


def test_what_was_compared_and_the_commands_are_said(show: Show) -> None:
    settings = {"workload": "digits-mlp", "optimizer": {"name": "sgd", "arguments": {"lr": 0.25}}}
    page = show([replace(make_run("sgd"), config=settings)])
    [said] = page.lines(2, "#settings")
    assert said[0] == "lr = 0.25"
    assert said[1].startswith("Not tuned: the workload's own settings but for lr = 0.25 (its own: ")
    assert "No command of a comparison was kept" in page.one("#commands").text
    page.click("details.run > summary")
    assert "rkfac train digits-mlp" in page.one("details.run .inside > pre").text


def test_downloads_hold_what_the_page_shows(
    show: Show, browser: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = show([*comparison(), make_run('=1+1, "quoted"')])
    folder = tmp_path_factory.mktemp("downloads")
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def fetched(button: str, name: str) -> str:
        page.click(f"#{button}")
        WebDriverWait(browser, 5, 0.05).until(lambda _: (folder / name).exists())
        return (folder / name).read_text(encoding="utf-8")

    lines = list(csv.DictReader(io.StringIO(fetched("curves-csv", "digits-mlp-curves.csv"))))
    fields = ("step", "cpu_seconds", "test_accuracy", "test_loss", "train_loss")
    expected = [
        (run.summary["label"], run.summary["seed"], line["train_seconds"], *(line[field] for field in fields))
        for run in comparison()
        for line in run.epochs
    ]
    read = [
        (line["optimizer"], int(line["seed"]), *(float(line[field]) for field in ("seconds", *fields)))
        for line in lines
    ]
    assert read[:-2] == expected
    assert read[-1][0] == '\'=1+1, "quoted"'  # no formula
    table = fetched("table-csv", "digits-mlp-table.csv")
    assert table == table_text.to_csv(tables.table1([*comparison(), make_run('=1+1, "quoted"')]))
    svg = fromstring(fetched("chart-svg", "digits-mlp-test_accuracy-seconds.svg"))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert sum(part.get("class") == "curve" for part in svg.iter()) == len(page.curves()) == 4


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
        width = "return charts.get(byId('curves')).plot.width"
        WebDriverWait(browser, 5, 0.05).until(lambda _: browser.execute_script(width) <= 360)
        assert browser.execute_script(paper) == "rgb(20, 23, 27)"
        assert list(page.curves()) == ["k-fac", "sgd", "adamw"]
        for table in ("#table", "#ratios", "#layer-table"):
            assert _sticks(browser, table), table
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def _sticks(browser: webdriver.Chrome, table: str) -> bool:
    """Whether the first column stays where it is when a table is scrolled sideways, and the second does not."""
    script = """
        const table = document.querySelector(arguments[0]), cells = table.querySelector("tbody tr").children;
        const places = () => [cells[0], cells[1]].map((cell) => cell.getBoundingClientRect().left);
        table.parentNode.scrollLeft = 0;
        const before = places();
        table.parentNode.scrollLeft = 60;
        const after = places();
        return [table.parentNode.scrollLeft, before[0] - after[0], before[1] - after[1]];
    """
    scrolled, first, second = browser.execute_script(script, table)
    return bool(scrolled > 0 and first == 0 and second == scrolled)

"""The HTML page in a real browser, all but its charts: tables, layers, runs, downloads, hostile text, small screens."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import Select, WebDriverWait

from rkfac_lab import report, table_text, tables

from .chromium import Show, comparison, records
from .handmade import make_run

HOSTILE = "<img src=x onerror=\"document.title='broken in'\">"


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

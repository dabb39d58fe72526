"""Chromium, words for what a test does with the HTML page in it, and runs whose page is known by heart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

from rkfac_lab.record import Run

from .handmade import make_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,1000"
)


COUNT = """
    const [slot] = arguments, { canvas } = charts.get(byId("curves")).plot.ctx;
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const wanted = [...css("--c", slot).match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16)), 255].join();
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let place = 0; place < data.length; place += 4) count += data.slice(place, place + 4).join() === wanted;
    return count;
"""


def _places(part: Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in str(part.get("points")).split()]
    return [(float(x), float(y)) for x, y in pairs]


def start_chromium(profile: Path) -> webdriver.Chrome:
    """A fresh headless browser that keeps its console; the driver's path is given, so that nothing is downloaded."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))


class Page:
    """A page in the browser, and short words for what tests do with it."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        [found] = self.all(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return [str(found.get_attribute("textContent")) for found in self.all(selector)]

    def click(self, selector: str) -> None:
        # A click of the mouse, not of a script: it fails when something lies over the button.
        found = self.one(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()

    def press(self, name: str, value: str) -> None:
        self.click(f"[aria-label='{name}'] [data-value='{value}']")

    def svg(self, within: str = "#curves") -> list[Element]:
        """The parts of the chart in an element as the page writes it down for downloading; none without a chart."""
        script = (
            "const chart = charts.get(document.querySelector(arguments[0])); return chart ? chartSvg(chart) : '<svg/>'"
        )
        return list(fromstring(self.browser.execute_script(script, within)).iter())

    def curves(self, within: str = "#curves") -> dict[str, list[tuple[float, float]]]:
        """The places of every curve's points, by the curve's name."""
        found = [part for part in self.svg(within) if part.get("class") == "curve"]
        return {str(part.get("data-name")): _places(part) for part in found}

    def bands(self) -> int:
        return sum(part.get("class") == "band" for part in self.svg())

    def rules(self) -> list[str]:
        return [str(part.text) for part in self.svg() if part.get("class") == "rule" and part.text]

    def painted(self, slot: int) -> int:
        """How many pixels of the canvas have a curve's colour, exactly."""
        return int(self.browser.execute_script(COUNT, slot))

    def column(self, number: int, table: str = "#table") -> list[str]:
        return self.texts(f"{table} tbody td:nth-child({number})")

    def lines(self, number: int, table: str = "#table") -> list[list[str]]:
        """The lines of each cell of a column."""
        return [cell.text.splitlines() for cell in self.all(f"{table} tbody td:nth-child({number})")]

    def ticks(self) -> list[str]:
        return [str(part.text) for part in self.svg() if part.get("text-anchor") == "end"]

    def choose(self, selector: str, text: str) -> None:
        Select(self.one(selector)).select_by_visible_text(text)

    def shown_values(self) -> dict[str, str]:
        names = self.texts("#curves .tip:not([hidden]) .row > span:nth-child(2)")
        return dict(zip(names, self.texts("#curves .tip:not([hidden]) .row b"), strict=True))


Show = Callable[[Sequence[Run]], Page]


def layer(name: str, epoch: int, **other: Any) -> dict[str, Any]:
    sizes = {"kind": "Linear", "input_dim": 65, "output_dim": 32, "rank_input": 10 * epoch, "rank_output": 5 * epoch}
    shares = {
        "captured_input": 0.9,
        "captured_output": 1 - 0.1 / epoch,
        "damping_input": 0.1 / epoch,
        "damping_output": 0.01,
    }
    seconds = {"statistics": 0.1 * epoch, "refresh": 0.3 * epoch, "apply": 0.2 * epoch}
    rest = {"clip": 0.5, "bytes": {"factors": 4000, "basis": 1000}, "failures": 0, "seconds": seconds}
    return {"name": name, "covered": True, "reason": "", **sizes, **shares, **rest, **other}


def records(names: Sequence[str], epochs: int) -> list[dict[str, Any]]:
    def uncovered(epoch: int) -> dict[str, Any]:
        nothing = dict.fromkeys(layer("", 1))
        return {**nothing, "name": "norm", "kind": "LayerNorm", "covered": False, "reason": "the pattern excludes it"}

    return [
        {
            "kind": "layers",
            "epoch": epoch,
            "train_seconds": 2.0 * epoch,
            "layers": [
                *(layer(name, epoch, rank_input=(place + 1) * 10 * epoch) for place, name in enumerate(names)),
                uncovered(epoch),
            ],
        }
        for epoch in range(1, epochs + 1)
    ]


def comparison() -> list[Run]:
    """Three optimizers, two seeds: k-fac is good and slow, sgd never reaches the second target."""
    runs = []
    for seed in (1, 2):
        shift = 0.01 * seed
        kfac = make_run(
            "k-fac", seed, accuracies=(0.7 + shift, 0.9, 0.96 + shift), epoch_seconds=(2, 2, 2), targets=(0.8, 0.95)
        )
        runs.append(replace(kfac, layers=records(("first", "second"), 3)))
        runs.append(
            make_run("sgd", seed, accuracies=(0.3, 0.6 + shift, 0.85), epoch_seconds=(1, 1, 1), targets=(0.8, 0.95))
        )
        fast = (0.5, 0.85, 0.95 + shift)
        runs.append(make_run("adamw", seed, accuracies=fast, epoch_seconds=(0.5, 0.5, 0.5), targets=(0.8, 0.95)))
    return runs

"""The site builds without a warning, asks nobody else for anything, and a person finds their way in a browser."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from lab.chromium import CHROMIUM, DRIVER, start_chromium

from .pages import DOCS, ROOT

ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)
FETCHED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    # Not quietly: then mkdocs would not count its warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_entry_of_the_reference_was_rendered(site: Path) -> None:
    for page in (DOCS / "reference").glob("*.md"):
        shown = (site / "reference" / page.name).with_suffix(".html").read_text()
        for name in ENTRY.findall(page.read_text()):
            assert f'id="{name}"' in shown, name


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert FETCHED.findall(page.read_text()) == [], page.name


def test_no_page_links_to_the_root_of_a_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert re.findall(r"(?:href|src)=[\"']?/[^\"'\s>]*", page.read_text()) == [], page.name


class Quiet(SimpleHTTPRequestHandler):
    """A server that keeps its log to itself."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def home(site: Path) -> Iterator[str]:
    """The address of the site on a server of our own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    driver = start_chromium(tmp_path)
    yield driver
    driver.quit()


def everything_is_here(browser: webdriver.Chrome, home: str) -> None:
    """Nothing went wrong on this page, and all of it came from the site."""
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith((home, "blob:", "data:")) for name in fetched), fetched
    assert browser.get_log("browser") == []
    pictures = browser.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert all(pictures), "a picture was not shown"


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Debian's chromium is not installed with its driver")
def test_a_person_finds_their_way(home: str, browser: webdriver.Chrome) -> None:
    browser.get(home)
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("rkfac")
    everything_is_here(browser, home)
    sections = browser.find_elements(By.CSS_SELECTOR, ".md-nav--primary > .md-nav__list > .md-nav__item--section")
    assert len(sections) >= 5
    for number in range(len(sections)):
        section = browser.find_elements(By.CSS_SELECTOR, ".md-nav--primary > .md-nav__list > .md-nav__item--section")[
            number
        ]
        entry = section.find_element(By.CSS_SELECTOR, "a.md-nav__link[href$='.html']")
        address = str(entry.get_attribute("href"))
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", entry)
        entry.click()
        WebDriverWait(browser, 10).until(lambda driver, address=address: driver.current_url == address)
        assert browser.find_element(By.TAG_NAME, "h1").text
        everything_is_here(browser, home)

    browser.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("damping")
    found = ".md-search-result__list > .md-search-result__item a[href]"
    WebDriverWait(browser, 10).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, found))
    results = browser.find_elements(By.CSS_SELECTOR, found)
    assert any("knobs" in str(result.get_attribute("href")) for result in results)
    results[0].click()
    WebDriverWait(browser, 10).until(
        lambda driver: "damping" in driver.find_element(By.TAG_NAME, "article").text.lower()
    )
    everything_is_here(browser, home)


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Debian's chromium is not installed with its driver")
def test_pages_fit_on_a_telephone(home: str, browser: webdriver.Chrome) -> None:
    screen = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for page in ("index", "knobs", "comparison", "performance", "reference/optimizers", "results/README"):
        browser.get(f"{home}{page}.html".replace("results/README.html", "results/index.html"))
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 420, f"{page} is {wide} wide"

"""A problem so small that a whole run takes milliseconds, the command with what it says, and a browser for pages."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rkfac_lab import compare, plots, report, speech, workloads
from rkfac_lab.cli import main


@pytest.fixture
def tiny(monkeypatch):
    """The name of a workload of 24 samples: three steps an epoch at batch size 8."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 6, generator=g), torch.arange(32) % 3
    data = workloads.Dataset(x[:24], y[:24], x[24:], y[24:], classes=3)
    problem = workloads.Workload(
        name="tiny",
        about="for tests",
        model=lambda found: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)),
        data=lambda sources: data,
        batch_size=8,
        epochs=4,
        loss=F.cross_entropy,
        metrics={"test_accuracy": workloads.accuracy},
        targets=(workloads.Target("test_accuracy", 0.3, "max"),),
        lr_shape="constant",  # so that runs can grow
        defaults={
            "sgd": {"lr": 0.1, "momentum": 0.9},
            "adamw": {"lr": 0.01},
            "k-fac": {"lr": 0.05},
            "rs-kfac": {"lr": 0.05},
        },
    )
    monkeypatch.setitem(workloads.WORKLOADS, problem.name, problem)
    return problem.name


@pytest.fixture
def typed(monkeypatch, capsys):
    """The command: its exit code, standard output and standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rkfac", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    yield call
    speech.choose(numbers=False, quiet=False)


@pytest.fixture
def rkfac(typed):
    """Its exit code and the lines it says in trouble."""

    def call(*arguments):
        code, _, trouble = typed(*arguments)
        return code, trouble.splitlines()

    return call


@pytest.fixture
def unadorned(monkeypatch):
    """Comparisons with blank pictures and no runs that warm the machine up: these are most of their time."""

    def blank(figure, stem):
        pictures = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
        for picture in pictures:
            picture.touch()
        return pictures

    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    monkeypatch.setattr(plots, "save", blank)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One chromium for all tests of the page."""
    from . import chromium

    if not (chromium.CHROMIUM and chromium.DRIVER):
        pytest.skip("the page is looked at in Debian's chromium, which is not installed with its driver")
    driver = chromium.start_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser, tmp_path):
    """Open the page on some runs; afterwards the console must be empty and nothing may have been fetched."""
    from . import chromium

    def opened(runs):
        browser.get(report.write(runs, tmp_path / "page.html").as_uri())
        return chromium.Page(browser)

    yield opened
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert browser.get_log("browser") == []
    assert fetched == []

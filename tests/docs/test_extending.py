"""The page on extending: its files are written as they stand there, and its commands run as they are printed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rkfac
from rkfac_lab import record
from rkfac_lab.cli import main

from .pages import DOCS, run

PAGE = (DOCS / "extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\w+\.(?:py|toml))\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
COMMANDS = re.findall(r"^    rkfac (.*)$", PAGE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the page's files, in which all of its commands have been given."""
    place = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (place / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [entry for entry in sys.path if entry])
        for command in COMMANDS:
            patch.setattr(sys, "argv", ["rkfac", *shlex.split(command)])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code, command
        yield place
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def test_there_are_files_and_commands() -> None:
    assert set(FILES) == {"strategies.py", "own.py", "rings.toml"}
    assert len(COMMANDS) == 5


def test_runs_are_what_the_page_says_of_them(folder: Path) -> None:
    runs = {path.parent.name: record.load_run(path.parent) for path in folder.rglob(record.CONFIG)}
    assert all(run.summary["status"] == "finished" for run in runs.values())
    share = runs["share"].config["optimizer"]["arguments"]["decomposition"]
    assert share == {"kind": "strategies:Share", "share": 0.25}
    (rings,) = [run for run in runs.values() if run.config["data"]]
    assert (rings.config["model"], rings.config["data"], rings.summary["kfac"]) == ("own:network", "own:rings", True)
    assert rings.summary["steps"] == 3 * 8
    assert {run.config["optimizer"]["name"] for run in runs.values()} >= {"own:PatientKFAC", "own:PatientKFAC+sgd"}


def test_the_error_that_is_shown_is_the_one_that_is_raised() -> None:
    scope = run(DOCS / "extending.md")

    class GatedAdapter(scope["GatedAdapter"]):  # type: ignore[misc,name-defined]
        def gradients(self, module: Any, x: Any, g: Any) -> Any:
            return -super().gradients(module, x, g)

    (shown,) = re.findall(r"^    AssertionError: (.*?)\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    with pytest.raises(AssertionError) as raised:
        rkfac.testing.check_adapter(scope["GatedLinear"](4, 3), torch.randn(5, 2, 4), adapter=GatedAdapter)
    numbers = re.compile(r"\d[\d.e+-]*\d")
    assert numbers.sub("#", " ".join(shown.split())) == numbers.sub("#", str(raised.value))

"""A problem of the user's own, named as module:NAME wherever a workload is named; and what is wrong with it, said."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rkfac_lab import compare, config, record, train
from rkfac_lab.errors import LabError
from rkfac_lab.workloads import find

DOCUMENT = Path(__file__).parents[2] / "docs" / "laboratory.md"
SOURCE = Path(__file__).parents[2] / "src"
NAME = "spirals:SPIRALS"


@pytest.fixture
def spirals(tmp_path, monkeypatch):
    """The example of the documentation as a file in the working folder; gone from Python's memory afterwards."""
    [example] = re.findall(r"```python\n# spirals\.py\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "spirals.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    yield tmp_path
    sys.modules.pop("spirals", None)


def command(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONSAFEPATH": "1"}  # as the console script: no folder
    call = [sys.executable, "-m", "rkfac_lab.cli", *map(str, arguments)]
    return subprocess.run(call, env=environment, capture_output=True, text=True, check=False)


def test_the_documented_example_trains_resumes_and_is_learned(spirals):
    ended = command("train", NAME, "--set", "optimizer.name=adamw", "--set", "threads=1", "--folder", "r")
    assert ended.returncode == 0, ended.stderr
    run = record.load_run(spirals / "r")
    assert run.summary["workload"] == NAME
    assert run.summary["final"]["test_accuracy"] > 0.9
    assert run.summary["final"]["step"] % find(NAME).evaluate_steps == 0
    summary = json.loads((spirals / "r" / record.SUMMARY).read_text())
    (spirals / "r" / record.SUMMARY).write_text(json.dumps({**summary, "status": "running"}))
    again = command("train", "r", "--resume")
    assert again.returncode == 0, again.stderr
    assert record.load_run(spirals / "r").summary["status"] == "finished"


def test_it_has_a_folder_name_where_none_is_given(spirals, rkfac):
    assert compare.choose_folder(None, NAME, resume=False).name.startswith("compare-spirals_SPIRALS-")
    code, said = rkfac("train", NAME, "--set", "optimizer.name=sgd", "--max-steps", 2)
    assert code == 0, said
    assert (spirals / "runs" / "spirals_SPIRALS-sgd-seed0" / record.CONFIG).is_file()


def test_it_compares_and_tunes(spirals, rkfac):
    arguments = ("--optimizers", "rs-kfac,sgd", "--seeds", 1, "--epochs", 1, "--grid", "0.01,0.1", "--out", "c")
    code, said = rkfac("compare", NAME, *arguments)
    assert code == 0, said
    assert json.loads((spirals / "c" / "table.json").read_text())["workload"] == NAME
    assert set(json.loads((spirals / "c" / "tuning.json").read_text())["chosen"]) == {"rs-kfac", "sgd"}


def test_it_has_spectra_and_its_settings_come_from_files(spirals, rkfac):
    code, said = rkfac("spectrum", NAME, "--steps-max", 4, "--out", "s")
    assert code == 0, said
    (spirals / "mine.toml").write_text(f'workload = "{NAME}"\nmax_steps = 3\n[optimizer]\nname = "sgd"\n')
    run = train.run(config.load("mine.toml"), spirals / "r")
    assert run.config["batch_size"] == find(NAME).batch_size
    assert run.summary["steps"] == 3


def test_the_installed_come_before_the_working_folder(spirals):
    (spirals / "wave.py").write_text("from spirals import SPIRALS as Error\n")
    with pytest.raises(LabError, match="wave:Error is a type and no"):
        find("wave:Error")


@pytest.mark.parametrize(
    "name, said",
    [
        ("nowhere_to_be_found:X", "The workload nowhere_to_be_found:X needs the module nowhere_to_be_found"),
        ("spirals:SPIRAL", r"no workload in spirals named 'SPIRAL'; did you mean 'SPIRALS'\?"),
        ("spirals:torch", r"spirals:torch is a module and no rkfac_lab\.workloads\.Workload"),
        ("broken:X", r"The module broken of the workload broken:X cannot be imported \(ZeroDivisionError"),
        ("spirals:", "The workload spirals: is not of the form module:NAME"),
        (":X", "The workload :X is not of the form module:NAME"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(spirals, name, said):
    (spirals / "broken.py").write_text("1 / 0\n")
    with pytest.raises(LabError, match=said):
        config.resolve(config.load(name))


def test_a_shape_nobody_knows_is_said_when_the_run_begins(spirals, monkeypatch):
    real = find(NAME)
    monkeypatch.setattr(sys.modules["spirals"], "SPIRALS", dataclasses.replace(real, lr_shape="banana"))
    with pytest.raises(LabError, match="There is no lr_shape 'banana'"):
        train.run(config.load(NAME, ["optimizer.name=sgd"]), spirals / "r")

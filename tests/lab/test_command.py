"""The command as a whole: what it says to users, where it says it, and how it refuses what it does not understand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import typer

import rkfac as library
from rkfac_lab import board, cli, progress, usage
from rkfac_lab.workloads import WORKLOADS


@pytest.fixture
def command(typed):
    """Exit code, standard output and standard error."""
    return typed


# --- help and versions


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_the_help_names_first_steps_commands_and_workloads(command, arguments):
    code, said, trouble = command(*arguments)
    assert (code, trouble) == (0, "")
    for first in ("rkfac demo", "rkfac compare digits-mlp", "rkfac doctor train.py"):
        assert first in said
    for name, workload in WORKLOADS.items():
        assert f"{name} " in said
        assert workload.about in said
    listed = said.partition("Commands:")[2].partition("Workloads:")[0]
    assert "..." not in listed, "every command has a whole sentence"
    assert {line.split()[0] for line in listed.strip().splitlines()} == {
        *("train", "report", "summary", "compare", "claims", "demo", "tune", "spectrum", "doctor", "bench", "data")
    }
    assert "docs/" in said
    assert "argument parsing" not in said


def test_the_versions(command):
    code, said, _ = command("--version")
    assert code == 0
    assert said.split(", ")[:2] == [f"rkfac {library.__version__}", f"torch {torch.__version__}"]
    _, said, _ = command("--version", "--json", "--quiet")
    assert json.loads(said)["rkfac"] == library.__version__


def test_it_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "rkfac_lab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"rkfac {library.__version__}, torch ")


# --- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ("'trian'", "did you mean 'train'", "`rkfac --help`")),
        (["--bogus"], ("--bogus", "`rkfac --help`")),
        (["compare", "--sedes", "3"], ("--sedes", "--seeds", "`rkfac compare --help`")),
        (["compare", "--seeds", "x"], ("'--seeds'", "integer", "such as 3", "`rkfac compare --help`")),
        (["compare", "--seeds"], ("'--seeds'", "argument")),
        (["compare", "a", "b"], ("(b)", "`rkfac compare --help`")),
        (["report"], ("'RUNS...'", "`rkfac report --help`")),
        (["doctor"], ("'SCRIPT'", "`rkfac doctor --help`")),
        (["spectrum", "--every", "0"], ("'--every'", "1", "`rkfac spectrum --help`")),
        (["bench", "decompose", "--rank", "many"], ("'--rank'", "such as 220", "`rkfac bench decompose --help`")),
        (["bench", "decompose", "--dimensions", "x"], ("--dimensions 'x'", "such as 513,1153")),
        (["bench", "scaling", "--widths", "10,-2"], ("--widths '10,-2'", "such as 1024,2048")),
        (["data", "got"], ("'got'", "`rkfac data --help`")),
    ],
)
def test_a_wrong_argument_is_one_sentence_with_what_is_right(command, arguments, words):
    code, said, trouble = command(*arguments)
    assert (code, said) == (2, "")
    assert trouble.startswith("rkfac: ")
    assert trouble.count("\n") == 1
    assert all(word in trouble for word in words), trouble


def test_a_group_without_a_command_shows_what_there_is(command):
    code, said, _ = command("bench")
    assert code == 2
    assert "scaling-out" in said


def test_an_interrupt_that_no_command_expects_ends_it(command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rkfac_lab.report.find_runs", interrupted)
    assert command("report", ".") == (130, "", "")


# --- where it speaks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["compare", "--json", "x", "--quiet"], ["--json", "--quiet", "compare", "x"]),
        (["--json", "data", "list"], ["--json", "data", "list"]),
        (["doctor", "a.py", "--quiet", "--", "--json"], ["--quiet", "doctor", "a.py", "--", "--json"]),
        ([], []),
    ],
)
def test_options_of_the_command_may_stand_anywhere_but_behind_a_lone_dash(given, expected):
    assert usage.hoisted(given) == expected


def test_data_in_numbers(command, tmp_path):
    code, said, _ = command("data", "list", "--data-dir", tmp_path, "--json")
    assert code == 0
    found = {entry["name"]: entry for entry in json.loads(said)}
    assert found["digits"] == {"name": "digits", "train": 1400, "test": 397, "missing": ""}
    assert found["cifar10"]["train"] is None
    assert "rkfac data get cifar10" in found["cifar10"]["missing"]


def test_a_run_in_numbers_in_words_and_quietly(command, tiny, tmp_path):
    code, said, trouble = command("train", tiny, "--set", "optimizer.name=sgd", "--folder", tmp_path / "a", "--json")
    assert code == 0
    found = json.loads(said)
    assert (found["status"], found["steps"], found["folder"]) == ("finished", 12, str(tmp_path / "a"))
    assert "sgd: 12 steps to do" in trouble
    assert "finished after 12 steps" in trouble, "a person still sees it"
    _, said, trouble = command("train", tiny, "--folder", tmp_path / "b", "--quiet")
    assert "finished after 12 steps" in said
    assert trouble == ""
    _, said, trouble = command("train", tiny, "--folder", tmp_path / "c", "--quiet", "--json")
    assert json.loads(said)["steps"] == 12
    assert trouble == ""
    _, said, trouble = command("train", tiny, "--folder", tmp_path / "d")
    assert said.count("\n") == 1
    assert "epoch 4, step 12 of 12" in trouble


def test_a_comparison_and_its_summary_in_numbers(command, tiny, tmp_path):
    arguments = (
        "compare",
        tiny,
        "--optimizers",
        "sgd,rs-kfac+sgd",
        "--seeds",
        1,
        "--epochs",
        1,
        "--out",
        tmp_path / "c",
    )
    code, said, trouble = command(*arguments, "--json")
    assert code == 0
    found = json.loads(said)
    assert found.pop("folder") == str(tmp_path / "c")
    assert found == json.loads((tmp_path / "c" / "table.json").read_text())
    assert "report.html" in trouble
    code, said, trouble = command("--quiet", "--json", "summary", tmp_path / "c")
    assert (code, trouble) == (0, "")
    (promise,) = json.loads(said)["promises"]
    assert (promise["workload"], promise["in the place of"]) == (tiny, "sgd")


def test_a_tuning_in_numbers(command, tiny, tmp_path):
    arguments = ("tune", tiny, "--optimizers", "sgd", "--trials", 2, "--epochs", 1, "--out", tmp_path / "t")
    code, said, _ = command("--json", *arguments)
    assert code == 0
    found = json.loads(said)
    assert found.pop("folder") == str(tmp_path / "t")
    assert found["chosen"] == json.loads((tmp_path / "t" / "tuning.json").read_text())["chosen"]


def test_a_benchmark_in_numbers(command, tmp_path):
    arguments = ("bench", "decompose", "--dimensions", "40", "--rank", 4, "--rounds", 1, "--out", tmp_path / "b.json")
    code, said, trouble = command(*arguments, "--json")
    assert code == 0
    assert json.loads(said) == json.loads((tmp_path / "b.json").read_text())
    assert "written to" in trouble


def test_what_goes_wrong_is_said_whatever_was_asked_for(command):
    code, said, trouble = command("train", "nothing-of-this-name", "--json", "--quiet")
    assert (code, said) == (2, "")
    assert "nothing-of-this-name" in trouble


# --- progress without a terminal


def test_a_long_benchmark_says_now_and_then_where_it_is(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Doing("measuring") as doing:
        for number in range(1, 101):
            now[0] += 1.0
            doing.update(f"problem {number} of 100")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [f"problem {number} of 100" for number in (30, 60, 90)]


# --- what has to be installed apart


def test_tensorboard_is_asked_for_before_the_run(command, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "_installed", lambda: False)
    folder = tmp_path / "r"
    code, _, trouble = command("train", tiny, "--set", "tensorboard=true", "--folder", folder)
    assert code == 2
    assert trouble.strip() == (
        "rkfac: tensorboard = true needs tensorboard, which is not installed: pip install 'rkfac[tensorboard]'."
    )
    assert not (folder / "config.json").exists()
    arguments = ("compare", tiny, "--optimizers", "sgd", "--set", "tensorboard=true", "--out", tmp_path / "c")
    code, _, trouble = command(*arguments)
    assert (code, trouble.count("pip install 'rkfac[tensorboard]'"), trouble.count("\n")) == (2, 1, 1)
    assert not (tmp_path / "c").exists()
    code, _, _ = command("train", tiny, "--folder", folder)
    assert code == 0, "nobody else needs it"


def test_whether_tensorboard_is_there_is_found_without_importing_it():
    assert board._installed()  # by the extra for developers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert not board._installed()


def test_typer_keeps_its_complaints_under_one_roof():
    assert issubclass(typer.BadParameter, usage.UsageError)
    assert usage.UsageError.__name__ == "UsageError"
    assert cli.app.info.cls is usage.Help

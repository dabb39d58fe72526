"""rkfac doctor: a program of the user's own is run, watched, stopped, and spoken about."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from rkfac.optim.base import CurvatureOptimizer
from rkfac_lab import doctor
from rkfac_lab.errors import LabError

TRAINING = """
import sys
import torch
import neighbour
import rkfac
from torch import nn


def train(steps=1000, **keywords):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = rkfac.RSKFAC(model, lr=0.01, eager_start=False, **keywords)
    for _ in range(steps):
        try:
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            print("stepped")
        except Exception:
            print("swallowed")


def clipped():
    train(30, graft=None, update_clip=1e-9)


def fails():
    train(3)
    raise RuntimeError("the disk is gone")


def two():
    train(2)
    train(4)


def built_only():
    train(0)


def plain():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()


number = 5

if __name__ == "__main__":
    print("arguments", sys.argv)
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else None)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a script and a module beside it, which the command is called in."""
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "user_training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("user_training", "neighbour"):
        sys.modules.pop(name, None)


@pytest.fixture
def command(place, typed):
    """`rkfac doctor`: exit code, standard output and standard error."""
    return lambda *arguments: typed("doctor", *arguments)


def test_a_script_is_run_as_python_runs_it_and_stopped_after_its_steps(command):
    code, said, trouble = command("user_training.py", "--steps", 7)
    assert (code, trouble) == (0, "")
    lines = said.splitlines()
    assert lines[0] == "arguments ['user_training.py']"
    assert lines.count("stepped") == 6, "the seventh step was taken and the program went no further"
    assert "swallowed" not in lines
    assert "RSKFAC" in lines
    assert any(line.startswith("7 steps in ") for line in lines)
    assert "Only 7 steps were taken" in said
    assert lines[-1] == "user_training.py was stopped after 7 steps (--steps)."


def test_what_follows_a_lone_dash_is_the_scripts(command):
    code, said, _ = command("user_training.py", "--quiet", "--", 3)
    assert code == 0
    assert "3 steps in " in said
    assert said.splitlines()[-1] == "user_training.py came to its end."
    assert "stepped" not in said, "what the script says is not the result"


def test_a_function_is_called(command):
    code, said, _ = command("user_training:clipped")
    assert code == 0
    assert "The clip has shortened 100% of the steps" in " ".join(said.split())


def test_a_module_that_trains_while_it_is_imported_is_watched_from_its_first_line(command, place):
    (place / "at_once.py").write_text("from user_training import train\n\ntrain()\n\n\ndef nothing():\n    pass\n")
    code, said, _ = command("at_once:nothing", "--steps", 3)
    assert code == 0
    assert "3 steps in " in said
    assert said.splitlines()[-1] == "at_once:nothing was stopped after 3 steps (--steps)."
    (place / "built_first.py").write_text("from user_training import built_only\n\nbuilt_only()\nmain = print\n")
    code, said, _ = command("built_first:main")
    assert code == 0
    assert "RSKFAC" in said
    assert said.splitlines()[-1] == "built_first:main came to its end."
    for name in ("at_once", "built_first"):
        sys.modules.pop(name, None)


def test_numbers_are_all_that_is_on_standard_output(command):
    code, said, trouble = command("user_training:two", "--json")
    assert code == 0
    found = json.loads(said)
    assert [patient["steps"] for patient in found["optimizers"]] == [2, 4]
    first = found["optimizers"][0]
    assert first["optimizer"] == "RSKFAC"
    assert [layer["name"] for layer in first["layers"]] == ["0", "2"]
    assert {remark["about"] for remark in first["advice"]} == {"periods longer than the run"}
    assert "stepped" in trouble


def test_an_error_of_the_program_is_one_line_after_what_was_seen(command):
    code, said, trouble = command("user_training:fails")
    assert code == 1
    assert "3 steps in " in said
    assert trouble.startswith("rkfac: RuntimeError: the disk is gone (traceback: ")
    assert trouble.count("\n") == 1
    kept = Path(trouble.strip().rpartition("traceback: ")[2].rstrip(")"))
    assert 'raise RuntimeError("the disk is gone")' in kept.read_text()


def test_a_program_that_gives_up_is_said_to(command):
    code, said, trouble = command("user_training.py", "--", 2, 3)
    assert code == 2
    assert "2 steps in " in said
    assert trouble.strip() == "rkfac: user_training.py gave up: exit code 3"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("user_training:plain", "without building an optimizer of rkfac (it steps with AdamW)"),
        ("neighbour.py", "without building an optimizer of rkfac; build one"),
        ("missing.py", "There is no script missing.py; name a file of Python, or a function as module:function."),
        ("missing:train", "needs the module missing"),
        ("user_training:trian", "did you mean 'train'?"),
        ("os:nosuch", "There is no function in os named 'nosuch'; the nearest of its "),
        ("user_training:number", "user_training:number is of type int and cannot be called"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(command, target, sentence):
    code, said, trouble = command(target)
    assert (code, said) == (2, "")
    assert sentence in trouble
    assert trouble.count("\n") == 1
    assert len(trouble) < 200


def test_steps_must_be_some(place):
    with pytest.raises(LabError, match="--steps must be at least 1"):
        doctor.visit("user_training.py", 0)


def test_an_optimizer_that_never_steps_is_reported_too(place):
    (patient,) = doctor.visit("user_training:built_only").patients
    assert [remark.about for remark in patient.advice] == ["no step yet"]


def test_nothing_is_left_behind(place, monkeypatch):
    build, words, path = CurvatureOptimizer.__init__, list(sys.argv), list(sys.path)
    doctor.visit("user_training.py", 2)
    assert CurvatureOptimizer.__init__ is build
    assert sys.argv == words
    assert sys.path == path
    monkeypatch.syspath_prepend(place)
    importlib.import_module("user_training").train(3)  # and nobody stops it


def test_an_interrupt_ends_the_visit_with_what_was_seen(command, monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, said, _ = command("user_training:two")
    assert code == 130
    assert "1 step in " in said

"""Runs that end at the wrong moment: what they leave, and what continuing makes of it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from forked import forking
from rkfac_lab import checkpoint, config, jobs, record, train
from rkfac_lab.cli import main
from rkfac_lab.errors import CrashError, LabError
from rkfac_lab.record import load_run

TIMES = ("train_seconds", "cpu_seconds", "epoch_seconds", "eval_seconds")


def chosen(workload, *settings, optimizer="sgd"):
    return config.load(workload, [f"optimizer.name={optimizer}", *settings])


def numbers(run):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.epochs]


class Killed(BaseException):
    """Nobody catches it, as nobody catches SIGKILL."""


class Failing(torch.optim.SGD):
    """Breaks in its fourth step."""

    fails = True

    def step(self, closure=None):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 4 and type(self).fails:
            raise RuntimeError("no\nrows \x1b[31mleft")
        return super().step(closure)


FAILING = ("optimizer.arguments.lr=0.1",)


def rkfac(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rkfac", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


# --- budgets and checkpoints


class Interrupted(io.BytesIO):
    """Ctrl-C comes with its n-th piece."""

    def __init__(self, pieces):
        super().__init__()
        self.left = pieces

    def write(self, content):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().write(content)


@pytest.mark.parametrize("piece", range(1, 9))
def test_an_interrupt_while_a_checkpoint_is_written_is_an_interrupt(tmp_path, monkeypatch, piece):
    """torch.save makes a RuntimeError of it, and a run that was stopped would count as one that crashed."""
    monkeypatch.setattr(checkpoint.disk, "write_atomically", lambda path, write: write(Interrupted(piece)))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "c", {"numbers": torch.zeros(1000)})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rs-kfac"])
def test_max_steps_leaves_a_checkpoint_that_a_larger_budget_continues(tmp_path, tiny, optimizer):
    run = train.run(chosen(tiny, "max_steps=5", optimizer=optimizer), tmp_path / "r")
    assert torch.load(tmp_path / "r" / record.CHECKPOINT, weights_only=True)["step"] == 5
    assert [(line["step"], line["partial"]) for line in run.epochs] == [(3, False), (5, True)]
    whole = train.run(chosen(tiny, optimizer=optimizer), tmp_path / "whole")
    resumed = train.run(chosen(tiny, "max_steps=1000", optimizer=optimizer), tmp_path / "r", resume=True)
    assert numbers(resumed) == numbers(whole)


def test_max_steps_below_one_epoch_leaves_a_checkpoint_from_the_command_line(tmp_path, tiny, monkeypatch):
    arguments = ("train", tiny, "--set", "optimizer.name=sgd", "--max-steps", 2, "--folder", tmp_path / "r")
    assert rkfac(monkeypatch, *arguments) == 0
    assert torch.load(tmp_path / "r" / record.CHECKPOINT, weights_only=True)["step"] == 2


@pytest.mark.parametrize("settings", [("max_steps=5",), ("max_steps=5", "checkpoint_seconds=0")])
def test_killed_between_the_last_checkpoint_and_its_evaluation(tmp_path, tiny, monkeypatch, settings):
    whole = train.run(chosen(tiny, *settings), tmp_path / "whole")
    real = train._Trainer._evaluate

    def killed(self):
        if self.step == 5:
            raise Killed
        return real(self)

    monkeypatch.setattr(train._Trainer, "_evaluate", killed)
    with pytest.raises(Killed):
        train.run(chosen(tiny, *settings), tmp_path / "r")
    monkeypatch.setattr(train._Trainer, "_evaluate", real)
    assert [line["step"] for line in load_run(tmp_path / "r").epochs] == [3]
    resumed = train.run(chosen(tiny, *settings), tmp_path / "r", resume=True)
    assert resumed.summary["status"] == "finished"
    assert numbers(resumed) == numbers(whole)
    assert resumed.summary["final"]["step"] == 5


def test_killed_after_the_measurement_it_is_not_made_twice(tmp_path, tiny):
    whole = train.run(chosen(tiny, "max_steps=5"), tmp_path / "r")
    summary = json.loads((tmp_path / "r" / record.SUMMARY).read_text())
    (tmp_path / "r" / record.SUMMARY).write_text(json.dumps({**summary, "status": "running"}))
    assert train.run(chosen(tiny, "max_steps=5"), tmp_path / "r", resume=True).epochs == whole.epochs


def _command(*arguments):
    sys.argv = ["rkfac", *map(str, arguments)]
    main()


def test_killed_without_warning_then_resumed_from_the_command_line(tmp_path, monkeypatch):
    settings = ("checkpoint_seconds=0", "epochs=7", "threads=1")
    words = [word for text in ("optimizer.name=adamw", *settings) for word in ("--set", text)]
    running = forking().Process(target=_command, args=("train", "digits-mlp", *words, "--folder", tmp_path / "cut"))
    running.start()
    metrics = tmp_path / "cut" / record.METRICS
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert running.is_alive(), "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.kill()
    running.join()
    assert running.exitcode == -signal.SIGKILL
    killed = load_run(tmp_path / "cut")
    assert killed.summary["status"] == "running"
    assert len(killed.epochs) < 7
    assert rkfac(monkeypatch, "train", tmp_path / "cut", "--resume") == 0
    whole = train.run(chosen("digits-mlp", *settings, optimizer="adamw"), tmp_path / "whole")
    resumed = load_run(tmp_path / "cut")
    assert numbers(resumed) == numbers(whole)
    assert resumed.summary["status"] == "finished"


def test_left_overs_of_killed_writers_are_cleaned_and_nothing_else(tmp_path, tiny):
    train.run(chosen(tiny, "epochs=1"), tmp_path / "r")
    for name in (".checkpoint.pt.4711", ".metrics.jsonl.1", ".summary.json.99999"):
        (tmp_path / "r" / name).write_bytes(b"half")
    for name in (".mine", "notes.txt", ".notes.txt.12"):
        (tmp_path / "r" / name).write_text("kept")
    train.run(chosen(tiny, "epochs=2"), tmp_path / "r", resume=True)
    hidden = {path.name for path in (tmp_path / "r").iterdir()} - set(record.FILES)
    assert hidden == {".mine", "notes.txt", ".notes.txt.12"}


# --- threads are part of a run


def test_threads_are_recorded_and_compared(tmp_path, tiny):
    settings = ("epochs=1",)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run = train.run(chosen(tiny, *settings), tmp_path / "r")
        assert run.config["threads"] == 1  # nobody asked for it, and yet it decides the numbers
        torch.set_num_threads(2)
        with pytest.raises(LabError, match=r"different: threads\).*--set threads=1"):
            train.run(chosen(tiny, "epochs=2"), tmp_path / "r", resume=True)
        resumed = train.run(config.load(str(tmp_path / "r"), ["epochs=2"]), tmp_path / "r", resume=True)
        assert resumed.environment["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_threads_of_a_run_recorded_without_them_are_those_of_its_environment(tmp_path, tiny):
    train.run(chosen(tiny, "epochs=1", "threads=1"), tmp_path / "r")
    path = tmp_path / "r" / record.CONFIG
    older = json.loads(path.read_text())
    del older["validation_share"]
    path.write_text(json.dumps({**older, "threads": None}))
    with pytest.raises(LabError, match=r"different: threads\)"):
        train.run(chosen(tiny, "epochs=1", "threads=2"), tmp_path / "r", resume=True)
    assert train.run(chosen(tiny, "epochs=1", "threads=1"), tmp_path / "r", resume=True).epochs


# --- what nobody foresaw


def test_a_traceback_goes_into_the_run_folder_and_one_line_to_the_screen(tmp_path, tiny, monkeypatch, capsys):
    folder = tmp_path / "r"
    settings = ["--set", f"optimizer.name={__name__}:Failing", "--set", *FAILING]
    assert rkfac(monkeypatch, "train", tiny, *settings, "--folder", folder) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"rkfac: RuntimeError: no rows \\x1b[31mleft (traceback: {folder / 'traceback.txt'})"
    kept = (folder / "traceback.txt").read_text()
    assert kept.startswith("Traceback")
    assert "in step" in kept
    assert load_run(folder).summary["status"] == "running"


def test_a_run_that_ends_well_after_all_has_no_traceback(tmp_path, tiny, monkeypatch):
    failing = chosen(tiny, *FAILING, optimizer=f"{__name__}:Failing")
    with pytest.raises(CrashError):
        train.run(failing, tmp_path / "r")
    monkeypatch.setattr(Failing, "fails", False)
    assert train.run(failing, tmp_path / "r", resume=True).summary["status"] == "finished"
    assert not (tmp_path / "r" / "traceback.txt").exists()


def test_a_crash_outside_of_a_run_is_one_line_too(tmp_path, monkeypatch, capsys):
    def crash(paths):
        raise KeyError("x")

    monkeypatch.setattr("rkfac_lab.report.find_runs", crash)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert rkfac(monkeypatch, "report", "anywhere") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rkfac: KeyError: 'x' (traceback: ")
    assert "find_runs" in Path(line.partition("traceback: ")[2].rstrip(")")).read_text()


def test_a_table_of_failures_names_no_place(tmp_path, tiny):
    failing = jobs.Job(chosen(tiny, *FAILING, optimizer=f"{__name__}:Failing"), tmp_path / "bad")
    good = jobs.Job(chosen(tiny, "epochs=1"), tmp_path / "good")
    with open(os.devnull, "w") as nowhere:
        results = jobs.run_all([failing, good], jobs.Display(jobs.Console(file=nowhere)))
    assert [failure.message for failure in results.failures] == ["RuntimeError: no rows \x1b[31mleft"]
    assert len(results.runs) == 1

"""What a log without a terminal shows while runs go on."""

from __future__ import annotations

import io

from rich.console import Console

from rkfac_lab import config, jobs, progress, train


def log():
    return Console(file=io.StringIO(), width=200)


def test_a_log_shows_a_line_an_evaluation(tmp_path, tiny):
    console = log()
    chosen = config.load(tiny, ["optimizer.name=sgd", "epochs=3"])
    run = train.run(chosen, tmp_path / "r", progress=progress.Bar(console))
    first, *lines = console.file.getvalue().splitlines()
    assert first == "sgd: 9 steps to do"
    assert len(lines) == 3
    assert lines[1].startswith("sgd: epoch 2, step 6 of 9, training loss ")
    assert lines[1].endswith(f"test accuracy {100 * run.epochs[1]['test_accuracy']:.2f}%")


def test_between_evaluations_a_line_comes_at_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = log()
    bar = progress.Bar(console)
    bar.begin("sgd", 100, 0)
    for step in range(1, 101):
        now[0] += 1.0
        bar.step(1, step, 0.5)
    assert console.file.getvalue().splitlines()[1:] == [
        f"sgd: epoch 1, step {step} of 100, loss 0.5000, {step} s so far" for step in (30, 60, 90)
    ]


def test_a_comparison_shows_lines_too(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(jobs, "Heartbeat", lambda console: progress.Heartbeat(console, seconds=0.0))
    console = log()
    job = jobs.Job(config.load(tiny, ["optimizer.name=sgd", "epochs=1"]), tmp_path / "r")
    jobs.run_all([job], jobs.Display(console))
    lines = console.file.getvalue().splitlines()
    assert [line.partition(", loss")[0] for line in lines[:3]] == [
        f"[1/1] sgd, seed 0: epoch 1, step {step} of 3" for step in (1, 2, 3)
    ]
    assert lines[3].startswith("[1/1] sgd, seed 0: finished")


def test_on_a_terminal_there_are_no_lines(monkeypatch):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    heartbeat = progress.Heartbeat(console, seconds=0.0)
    heartbeat.step("sgd", 1, 1, 2, 0.5, 0.0)
    assert console.file.getvalue() == ""

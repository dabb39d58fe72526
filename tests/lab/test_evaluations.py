"""Evaluations inside epochs: when they are due, what they say, and that a run cut anywhere says the same."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from rkfac_lab import config, record, train, workloads
from rkfac_lab.errors import LabError
from rkfac_lab.progress import Silent

TIMES = ("train_seconds", "cpu_seconds", "epoch_seconds", "eval_seconds")


def chosen(workload, *settings):
    return config.load(workload, ["optimizer.name=adamw", "evaluate_steps=2", *settings])


def numbers(run):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.epochs]


def places(run):
    return [(line["epoch"], line["step"], line["partial"]) for line in run.epochs]


class KilledAt(Silent):
    def __init__(self, step):
        self.at = step

    def step(self, epoch, step, loss):
        if step == self.at:
            raise SystemExit  # neither the loop nor `run` has anything to say about it


def test_every_two_steps_and_at_the_ends_of_epochs(tmp_path, tiny):
    run = train.run(chosen(tiny, "epochs=3"), tmp_path / "r")
    assert places(run) == [
        (1, 2, True),
        (1, 3, False),
        (2, 4, True),
        (2, 6, False),
        (3, 8, True),
        (3, 9, False),
    ]
    whole = [line["epoch_seconds"] for line in run.epochs if not line["partial"]]
    assert sum(whole) == pytest.approx(run.summary["train_seconds"])


def test_a_due_step_at_an_epochs_end_counts_also_between_evaluated_epochs(tmp_path, tiny):
    run = train.run(chosen(tiny, "epochs=4", "evaluate_every=4"), tmp_path / "r")
    assert [line["step"] for line in run.epochs] == [2, 4, 6, 8, 10, 12]


def test_zero_turns_the_workloads_own_off(tmp_path, tiny, monkeypatch):
    often = dataclasses.replace(workloads.find(tiny), evaluate_steps=1)
    monkeypatch.setitem(workloads.WORKLOADS, tiny, often)
    run = train.run(config.load(tiny, ["optimizer.name=sgd", "epochs=1"]), tmp_path / "r")
    assert [line["step"] for line in run.epochs] == [1, 2, 3]
    run = train.run(config.load(tiny, ["optimizer.name=sgd", "epochs=2", "evaluate_steps=0"]), tmp_path / "off")
    assert [line["step"] for line in run.epochs] == [3, 6]
    with pytest.raises(LabError, match="evaluate_steps must not be negative"):
        config.load(tiny, ["evaluate_steps=-1"])


def test_evaluations_change_nothing_in_the_training(tmp_path, tiny):
    often = train.run(chosen(tiny, "evaluate_steps=1"), tmp_path / "often")
    never = train.run(chosen(tiny, "evaluate_steps=0"), tmp_path / "never")
    ends = [line for line in often.epochs if not line["partial"]]
    assert [line["test_loss"] for line in ends] == [line["test_loss"] for line in never.epochs]


def test_the_training_loss_is_the_mean_since_the_last_evaluation(tmp_path, tiny):
    single = [line["train_loss"] for line in train.run(chosen(tiny, "evaluate_steps=1"), tmp_path / "a").epochs]
    pairs = {line["step"]: line["train_loss"] for line in train.run(chosen(tiny), tmp_path / "b").epochs}
    assert pairs[2] == pytest.approx((single[0] + single[1]) / 2)
    assert pairs[3] == pytest.approx(single[2])  # an epoch's end begins anew
    assert pairs[4] == pytest.approx(single[3])


@pytest.mark.parametrize("shape", ["linear", "constant"])
@pytest.mark.parametrize("seconds", [0, 300])
@pytest.mark.parametrize("at", range(1, 12))
def test_cut_anywhere_it_ends_with_the_same_numbers(tmp_path, tiny, at, seconds, shape):
    settings = (f"checkpoint_seconds={seconds}", f"lr_shape={shape}")
    whole = train.run(chosen(tiny, *settings), tmp_path / "whole")
    with pytest.raises(SystemExit):
        train.run(chosen(tiny, *settings), tmp_path / "cut", progress=KilledAt(at))
    resumed = train.run(chosen(tiny, *settings), tmp_path / "cut", resume=True)
    assert numbers(resumed) == numbers(whole)
    crossings = [[(goal["step"], goal["epoch"]) for goal in run.summary["targets"]] for run in (resumed, whole)]
    assert crossings[0] == crossings[1]


@pytest.mark.parametrize("at", range(1, 12))
def test_a_larger_budget_drops_only_what_the_smaller_one_made_it_measure(tmp_path, tiny, at):
    whole = train.run(chosen(tiny), tmp_path / "whole")
    short = train.run(chosen(tiny, f"max_steps={at}"), tmp_path / "grown")
    assert short.epochs[-1]["step"] == at
    assert numbers(train.run(chosen(tiny, "max_steps=99"), tmp_path / "grown", resume=True)) == numbers(whole)


def test_a_missing_line_inside_an_epoch_is_damage(tmp_path, tiny):
    train.run(chosen(tiny, "max_steps=5"), tmp_path / "r")
    path = tmp_path / "r" / record.METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] != 4))
    with pytest.raises(LabError, match=r"metrics\.jsonl .*lacks step 4 of epoch 2"):
        train.run(chosen(tiny, "max_steps=99"), tmp_path / "r", resume=True)


def test_the_first_crossing_inside_an_epoch_is_the_one_recorded(tmp_path, tiny, monkeypatch):
    goals = tuple(workloads.Target("test_loss", value, "min") for value in (9.0, 0.0))
    monkeypatch.setitem(workloads.WORKLOADS, tiny, dataclasses.replace(workloads.find(tiny), targets=goals))
    run = train.run(chosen(tiny), tmp_path / "r")
    first, never = run.summary["targets"]
    line = run.epochs[0]
    assert (first["step"], first["epoch"], first["seconds"], first["cpu_seconds"]) == (
        *(2, 1),
        *(line["train_seconds"], line["cpu_seconds"]),
    )
    assert [never[key] for key in ("reached", "step", "epoch", "seconds", "cpu_seconds")] == [False, *[None] * 4]


def test_cpu_seconds_count_steps_alone(tmp_path, tiny, monkeypatch):
    """A clock that advances one second a reading: two readings a step, and nobody else looks at it."""
    ticks = iter(range(100_000))
    monkeypatch.setattr(train.time, "process_time", lambda: float(next(ticks)))
    run = train.run(chosen(tiny, "max_steps=5"), tmp_path / "r")
    assert [line["cpu_seconds"] for line in run.epochs] == [line["step"] for line in run.epochs]
    assert run.summary["cpu_seconds"] == 5
    resumed = train.run(chosen(tiny), tmp_path / "r", resume=True)
    assert [line["cpu_seconds"] for line in resumed.epochs] == [line["step"] for line in resumed.epochs]


def test_a_fixed_part_of_the_test_set_spread_evenly(tmp_path, tiny, monkeypatch):
    part = dataclasses.replace(workloads.find(tiny), evaluation_size=3)
    real = part.data(workloads.Sources())
    kept = torch.tensor([0, 2, 5])  # of eight
    small = dataclasses.replace(real, test_x=real.test_x[kept], test_y=real.test_y[kept])
    wanted = dataclasses.replace(workloads.find(tiny), data=lambda sources: small)
    runs = []
    for problem in (part, wanted):
        monkeypatch.setitem(workloads.WORKLOADS, tiny, problem)
        runs.append(numbers(train.run(chosen(tiny), tmp_path / str(len(runs)))))
    assert runs[0] == runs[1]

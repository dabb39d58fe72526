"""Tuning looks at a part of the training data, and at nothing of the test set."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from rkfac_lab import compare, config, record, train, tuning, validation, workloads
from rkfac_lab.comparison import Comparison
from rkfac_lab.workloads import Dataset, Sources, find

from .test_workloads import small_data


def numbered(count=50):
    x = torch.arange(count).float()[:, None]
    return Dataset(x, torch.arange(count), x + 1000, torch.arange(count), classes=count)


def test_the_two_parts_are_all_of_the_training_data_and_nothing_of_the_test_set():
    parts = validation.split(numbered(), 0.2)
    assert (len(parts.train_x), len(parts.test_x)) == (40, 10)
    assert sorted([*parts.train_y.tolist(), *parts.test_y.tolist()]) == list(range(50))
    assert torch.equal(parts.test_x[:, 0], parts.test_y.float())  # samples kept their labels
    assert parts.test_y.tolist() != list(range(10))  # drawn, since data may come sorted
    assert validation.split(numbered(), 0.2).test_y.tolist() == parts.test_y.tolist()


def test_of_a_sequence_the_end_is_kept_apart():
    parts = validation.split(dataclasses.replace(numbered(), ordered=True), 0.2)
    assert sorted(parts.test_y.tolist()) == list(range(40, 50))
    assert sorted(parts.train_y.tolist()) == list(range(40))
    assert parts.ordered


@pytest.mark.parametrize("name", [name for name in workloads.WORKLOADS if name != "cifar10-vgg16bn"])
def test_every_workload_trains_and_is_measured_on_its_own_training_data(tmp_path, monkeypatch, name):
    """Twelve samples of its stored form; the test set is such that looking at it would fail."""
    real, small = find(name), small_data(name)
    x, y = (
        small.train_x.repeat(3, *[1] * (small.train_x.dim() - 1)),
        small.train_y.repeat(3, *[1] * (small.train_y.dim() - 1)),
    )
    data = dataclasses.replace(small, train_x=x, train_y=y, test_x=x[:0], test_y=y[:0])
    monkeypatch.setitem(workloads.WORKLOADS, name, dataclasses.replace(real, data=lambda sources: data))
    settings = ["optimizer.name=sgd", "validation_share=0.25", "max_steps=2", "batch_size=5", "evaluate_steps=1"]
    run = train.run(config.load(name, settings), tmp_path / "r")
    assert [line["step"] for line in run.epochs] == [1, 2]
    goals = {target["metric"] for target in run.summary["targets"]}
    assert goals
    assert all(goal.startswith("validation_") and run.epochs[-1][goal] is not None for goal in goals)


def test_the_text_keeps_its_end_apart(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(6400)))
    whole = find("text-transformer").data(Sources(text_file=str(path)))
    parts = validation.split(whole, 0.25)
    cut = len(parts.train_x)
    assert torch.equal(parts.train_x.flip(0), whole.train_x[:cut])
    assert torch.equal(parts.test_x.flip(0), whole.train_x[cut:])
    assert torch.equal(parts.test_y.flip(0), whole.train_y[cut:])


def test_nothing_held_out_is_the_workload_itself(tiny):
    assert validation.held_out(find(tiny), 0.0) is find(tiny)


def test_a_run_with_a_validation_share_measures_there_and_says_so(tmp_path, tiny):
    settings = ["optimizer.name=sgd", "epochs=2", "validation_share=0.25", "batch_size=6"]
    run = train.run(config.load(tiny, settings), tmp_path / "r")
    assert [line["step"] for line in run.epochs] == [3, 6]  # 18 of the 24 samples
    for line in run.epochs:
        assert not [name for name in line if name.startswith("test_")]
        assert line["validation_accuracy"] * 6 == pytest.approx(round(line["validation_accuracy"] * 6))
    assert [target["metric"] for target in run.summary["targets"]] == ["validation_accuracy"]
    assert run.summary["best"]["validation_loss"] > 0


def tuned(tmp_path, workload, monkeypatch):
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    comparison = Comparison(workload, ("sgd", "adamw"), seeds=1, common={"epochs": 2})
    search = tuning.in_passing(comparison, (0.001, 0.1), epochs=2)
    compare.run(comparison, tmp_path, search=search, console=Console(file=io.StringIO()))
    written = json.loads((tmp_path / "tuning.json").read_text())
    for trial in written["trials"]:
        trial.pop("cpu_seconds")  # the machine's, not the trial's
    return written


def test_tuning_does_not_know_the_test_set(tmp_path, tiny, monkeypatch):
    """The same choice, to the last digit, whatever the test set is; the reported runs do depend on it."""
    first = tuned(tmp_path / "a", tiny, monkeypatch)
    real = find(tiny)

    def other_test_set(sources):
        data = real.data(sources)
        return dataclasses.replace(data, test_x=1e3 * torch.ones_like(data.test_x), test_y=1 - data.test_y.clamp(max=1))

    monkeypatch.setitem(workloads.WORKLOADS, tiny, dataclasses.replace(real, data=other_test_set))
    assert tuned(tmp_path / "b", tiny, monkeypatch) == first
    assert first["metric"] == "validation_accuracy"
    losses = [record.load_run(tmp_path / place / "runs" / "sgd-seed0").epochs[-1]["test_loss"] for place in ("a", "b")]
    assert losses[0] != losses[1]
    trained = record.load_run(tmp_path / "a" / "runs" / "sgd-seed0")
    assert trained.config["validation_share"] == 0  # what is reported trains on everything
    assert trained.epochs[-1]["step"] == 6

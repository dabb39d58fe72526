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
from rkfac_lab.workloads import Dataset, find


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

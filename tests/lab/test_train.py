"""The training loop: budgets, statuses, and resuming to the same numbers after every kind of end."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import pytest
import torch

from rkfac_lab import config, machine, record, train, workloads
from rkfac_lab.cli import main
from rkfac_lab.errors import LabError
from rkfac_lab.progress import Silent
from rkfac_lab.record import load_run

TIMES = ("train_seconds", "cpu_seconds", "epoch_seconds", "eval_seconds")


GROWS = "lr_shape=constant"  # a rate that does not depend on where the run will end


def configuration(*settings, optimizer="adamw", epochs=3):
    return config.load("digits-mlp", [f"optimizer.name={optimizer}", f"epochs={epochs}", *settings])


@pytest.fixture(autouse=True)
def _slim(monkeypatch):
    """The digits with a narrower network: the optimizers' own cost is not what is tested."""
    narrow = dataclasses.replace(
        workloads.find("digits-mlp"), model=lambda data: workloads.models.build("mlp", sizes=(64, 96, 80, 10))
    )
    monkeypatch.setitem(workloads.WORKLOADS, narrow.name, narrow)


def numbers(run):
    """Every measured number that time does not touch."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.epochs]


class InterruptAt(Silent):
    """Presses Ctrl-C after a given step."""

    def __init__(self, step):
        self.at = step

    def step(self, epoch, step, loss):
        if step == self.at:
            raise KeyboardInterrupt


class Reporting(torch.optim.SGD):
    """An optimizer that knows about its layers, as rkfac's do."""

    closed = 0

    def report(self):
        layer = dataclasses.make_dataclass("Layer", ["name", "captured_input"])
        return [layer("1", float("nan")), layer("3", 0.5)]

    def close(self):
        type(self).closed += 1


def summary_of_crossing(run):
    return [[goal[key] for key in ("seconds", "cpu_seconds", "step", "epoch")] for goal in run.summary["targets"]]


def summary_by_hand(run):
    hits = [[ln for ln in run.epochs if ln["test_accuracy"] >= value] for value in (0.95, 0.97, 0.98)]
    keys = ("train_seconds", "cpu_seconds", "step", "epoch")
    return [[hit[0][key] for key in keys] if hit else [None] * 4 for hit in hits]


def test_a_run_leaves_a_complete_folder(tmp_path):
    run = train.run(configuration(), tmp_path / "r")
    assert [line["epoch"] for line in run.epochs] == [1, 2, 3]
    assert [line["step"] for line in run.epochs] == [11, 22, 33]
    seconds = [line["train_seconds"] for line in run.epochs]
    assert seconds == sorted(seconds)
    assert sum(line["epoch_seconds"] for line in run.epochs) == pytest.approx(seconds[-1])
    assert [line["lr"] for line in run.epochs] == pytest.approx([1e-2 * left / 32 for left in (23, 12, 1)])
    cpu = [line["cpu_seconds"] for line in run.epochs]
    assert cpu == sorted(cpu)
    assert cpu[0] > 0
    assert summary_of_crossing(run) == summary_by_hand(run)
    assert run.config["batch_size"] == 128
    summary = run.summary
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("finished", 3, 33)
    assert (summary["workload"], summary["optimizer"], summary["label"]) == ("digits-mlp", "adamw", "adamw")
    assert summary["final"] == run.epochs[-1]
    assert run.environment["threads"] == torch.get_num_threads()


def test_the_loop_computes_what_a_plain_loop_computes(tmp_path):
    """The same numbers from torch alone, sharing nothing with the loop but model, data and order of samples."""
    chosen = config.resolve(configuration("seed=4", "batch_size=200", "lr_shape=constant", optimizer="sgd"))
    run = train.run(chosen, tmp_path / "r")
    workload = workloads.find("digits-mlp")
    data = workload.data(workloads.Sources())
    torch.manual_seed(4)
    model = workload.model(data)
    optimizer = torch.optim.SGD(model.parameters(), **chosen.optimizer.arguments)
    generator = torch.Generator().manual_seed(4)
    for line in run.epochs:
        losses = []
        for chunk in torch.randperm(1400, generator=generator).split(200):
            loss = torch.nn.functional.cross_entropy(model(data.train_x[chunk]), data.train_y[chunk])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert line["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        hits = (model(data.test_x).argmax(1) == data.test_y).sum().item()
        assert line["test_accuracy"] == pytest.approx(hits / 397, abs=1.1 / 397)


def test_same_seed_same_numbers_other_seed_other_numbers(tmp_path):
    runs = [train.run(configuration(f"seed={seed}"), tmp_path / str(i)) for i, seed in enumerate((0, 0, 1))]
    assert numbers(runs[0]) == numbers(runs[1])
    assert numbers(runs[0]) != numbers(runs[2])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "soap", "k-fac", "rs-kfac", "sre-kfac"])
@pytest.mark.parametrize("settings", [(), ("checkpoint_seconds=0",)], ids=["epoch ends", "every step"])
def test_interrupted_in_the_middle_of_an_epoch_then_resumed(tmp_path, optimizer, settings):
    whole = train.run(configuration(*settings, optimizer=optimizer), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train.run(configuration(*settings, optimizer=optimizer), tmp_path / "cut", progress=InterruptAt(17))
    assert load_run(tmp_path / "cut").summary["status"] == "interrupted"
    at = torch.load(tmp_path / "cut" / record.CHECKPOINT, weights_only=True)["step"]
    assert at == (16 if settings else 11)
    resumed = train.run(configuration(*settings, optimizer=optimizer), tmp_path / "cut", resume=True)
    assert numbers(resumed) == numbers(whole)
    assert resumed.summary["status"] == "finished"


def test_dropout_batchnorm_and_augmentation_resume_too(tmp_path, monkeypatch):
    """A miniature of cifar10-vgg-small: everything random or stateful that a run can have, in channels_last."""
    torch.manual_seed(0)
    images, labels = torch.randint(256, (24, 3, 32, 32), dtype=torch.uint8), torch.arange(24) % 10
    data = workloads.Dataset(images, labels, images[:8], labels[:8], classes=10)
    small = dataclasses.replace(
        workloads.find("cifar10-vgg-small"),
        data=lambda sources: data,
        model=lambda found: workloads.models.build("vgg16bn", width=0.0625, classes=10),
    )
    monkeypatch.setitem(workloads.WORKLOADS, small.name, small)
    chosen = config.load(
        small.name, ["optimizer.name=sgd", "epochs=2", "batch_size=8", "checkpoint_seconds=0", "threads=1"]
    )
    whole = train.run(chosen, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train.run(chosen, tmp_path / "cut", progress=InterruptAt(3))
    assert numbers(train.run(chosen, tmp_path / "cut", resume=True)) == numbers(whole)
    assert load_run(tmp_path / "cut").epochs[0]["partial"] is False


def test_lines_newer_than_the_checkpoint_are_done_again(tmp_path):
    """Killed between writing the metrics of an epoch and its checkpoint."""
    train.run(configuration(GROWS), tmp_path / "r")
    older = (tmp_path / "r" / record.CHECKPOINT).read_bytes()
    whole = train.run(configuration(GROWS, epochs=5), tmp_path / "r", resume=True)
    (tmp_path / "r" / record.CHECKPOINT).write_bytes(older)
    summary = json.loads((tmp_path / "r" / record.SUMMARY).read_text())
    (tmp_path / "r" / record.SUMMARY).write_text(json.dumps({**summary, "status": "running"}))
    assert numbers(train.run(configuration(GROWS, epochs=5), tmp_path / "r", resume=True)) == numbers(whole)


def test_slow_checkpoints_are_not_made_at_every_epoch(tmp_path, monkeypatch):
    saved, genuine = [], record.RunFolder.save_checkpoint

    def slow(folder, state):
        saved.append(state["epoch"])
        time.sleep(0.3)
        genuine(folder, state)

    whole = train.run(configuration(epochs=6), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(record.RunFolder, "save_checkpoint", slow)
        with pytest.raises(KeyboardInterrupt):
            train.run(configuration(epochs=6), tmp_path / "r", progress=InterruptAt(50))
    assert saved == [2], "the first epoch's end shows how long it takes; five more take no twentieth of that"
    assert numbers(train.run(configuration(epochs=6), tmp_path / "r", resume=True)) == numbers(whole)


def test_more_epochs_continue_as_if_never_stopped(tmp_path):
    whole = train.run(configuration(GROWS, epochs=4), tmp_path / "whole")
    train.run(configuration(GROWS, epochs=2), tmp_path / "grown")
    assert numbers(train.run(configuration(GROWS, epochs=4), tmp_path / "grown", resume=True)) == numbers(whole)


def test_a_run_whose_learning_rate_ends_with_it_cannot_grow(tmp_path):
    train.run(configuration(epochs=2), tmp_path / "r")
    with pytest.raises(LabError, match=r"other epochs: .* 'linear', which ends with the run; .*lr_shape=constant"):
        train.run(configuration(epochs=4), tmp_path / "r", resume=True)
    train.run(configuration("time_budget=1e-9"), tmp_path / "short")
    whole = train.run(configuration(), tmp_path / "whole")
    grown = train.run(configuration("time_budget=1e9"), tmp_path / "short", resume=True)
    assert numbers(grown) == numbers(whole)


def test_a_finished_run_is_not_done_again(tmp_path):
    first = train.run(configuration(), tmp_path / "r")
    assert train.run(configuration(), tmp_path / "r", resume=True) == first


def test_another_configuration_is_refused_by_key(tmp_path):
    train.run(configuration(), tmp_path / "r")
    with pytest.raises(LabError, match=r"different: optimizer\.arguments\.lr, seed\)"):
        train.run(configuration("optimizer.arguments.lr=0.5", "seed=1"), tmp_path / "r", resume=True)
    with pytest.raises(LabError, match=r"different: epochs\)"):
        train.run(configuration(epochs=2), tmp_path / "r", resume=True)
    with pytest.raises(LabError, match="add --resume"):
        train.run(configuration(), tmp_path / "r")


def test_what_nobody_could_build_is_said_before_whose_the_folder_is(tmp_path):
    train.run(config.load("digits-mlp", ["max_steps=1"]), tmp_path)
    for setting, said in (
        ('decomposition={kind = "nystrm"}', "did you mean 'nystrom'"),
        ("dampin=1", "did you mean 'damping'"),
    ):
        with pytest.raises(LabError, match=said):
            train.run(config.load("digits-mlp", ["max_steps=1", f"optimizer.arguments.{setting}"]), tmp_path)


def test_max_steps_ends_inside_an_epoch_and_can_grow(tmp_path):
    run = train.run(configuration(GROWS, "max_steps=15"), tmp_path / "r")
    assert [(line["step"], line["partial"]) for line in run.epochs] == [(11, False), (15, True)]
    assert (run.summary["steps"], run.summary["epochs"], run.summary["status"]) == (15, 1, "finished")
    whole = train.run(configuration(GROWS), tmp_path / "whole")
    assert numbers(train.run(configuration(GROWS, "max_steps=1000"), tmp_path / "r", resume=True)) == numbers(whole)


def test_time_budget_counts_training_only(tmp_path, monkeypatch):
    """A clock that advances one second a reading: each step takes one second, evaluation is not counted."""
    ticks = iter(range(100_000))
    monkeypatch.setattr(train.time, "perf_counter", lambda: float(next(ticks)))
    run = train.run(configuration("time_budget=14"), tmp_path / "r")
    assert [(line["step"], line["train_seconds"]) for line in run.epochs] == [(11, 11.0), (14, 14.0)]


def test_divergence_ends_the_run_and_stays(tmp_path):
    chosen = configuration("optimizer.arguments.lr=1e20", optimizer="sgd")
    run = train.run(chosen, tmp_path / "r")
    assert run.summary["status"] == "diverged"
    assert run.summary["steps"] < 33
    assert all(value is not None for line in run.epochs for value in line.values())
    assert train.run(chosen, tmp_path / "r", resume=True).summary["status"] == "diverged"


def test_evaluate_every_other_epoch_and_the_last(tmp_path):
    run = train.run(configuration("evaluate_every=2", epochs=5), tmp_path / "r")
    assert [line["epoch"] for line in run.epochs] == [2, 4, 5]
    assert run.summary["epochs"] == 5


def test_schedule_is_in_force_and_recorded(tmp_path):
    run = train.run(configuration("schedule.lr.2=0.001", "schedule.lr.3=0", optimizer="sgd", epochs=4), tmp_path / "r")
    assert [line["lr"] for line in run.epochs] == [0.3, 0.001, 0, 0]
    assert run.epochs[2]["test_loss"] == run.epochs[3]["test_loss"]
    assert run.epochs[0]["test_loss"] != run.epochs[1]["test_loss"]


def test_a_schedule_that_cannot_work_leaves_no_folder(tmp_path):
    with pytest.raises(LabError, match="'dampin'"):
        train.run(configuration("schedule.dampin.2=1", optimizer="sgd"), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_report_of_the_layers_is_written_and_hooks_are_let_go(tmp_path):
    before = Reporting.closed
    run = train.run(configuration("optimizer.arguments.lr=0.1", optimizer=f"{__name__}:Reporting"), tmp_path / "r")
    assert [line["epoch"] for line in run.layers] == [1, 2, 3]
    assert run.layers[0]["layers"] == [{"name": "1", "captured_input": None}, {"name": "3", "captured_input": 0.5}]
    assert Reporting.closed == before + 1


def test_threads_are_set_for_the_run_and_restored(tmp_path):
    before = torch.get_num_threads()
    run = train.run(configuration("threads=2", epochs=1), tmp_path / "r")
    assert run.environment["threads"] == 2
    assert torch.get_num_threads() == before


def test_unusable_device_is_said():
    with pytest.raises(LabError, match="device 'abacus' cannot be used"):
        machine.device("abacus")


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train.run(configuration("tensorboard=true"), tmp_path / "r")
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    assert logged == [(line["step"], pytest.approx(line["test_accuracy"])) for line in run.epochs]


def test_command_line_interrupt_says_how_to_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rkfac_lab.progress.Bar", lambda: InterruptAt(5))
    folder = str(tmp_path / "r")
    monkeypatch.setattr(sys, "argv", ["rkfac", "train", "--set", "optimizer.name=sgd", "--folder", folder])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert f"rkfac train {folder} --resume" in capsys.readouterr().err


def test_command_line_mistake_is_one_sentence_and_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rkfac", "train", "digits-mpl"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert "did you mean 'digits-mlp'" in message
    assert message.count("\n") == 1

"""The run folder: what is written can be read, and a crash never leaves half a file."""

from __future__ import annotations

import json

import pytest
import torch

from rkfac_lab import disk, record
from rkfac_lab.errors import LabError
from rkfac_lab.record import RunFolder, load_run, summarise
from rkfac_lab.workloads import Target

from .handmade import make_run


def line(epoch, accuracy, seconds=None):
    return {"kind": "epoch", "epoch": epoch, "step": 10 * epoch, "train_seconds": seconds or float(epoch), "epoch_seconds": 1.0,
            "test_loss": 1.0 / epoch, "test_accuracy": accuracy}  # fmt: skip


def test_written_is_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write(record.CONFIG, {"workload": "w"})
    folder.write(record.SUMMARY, make_run("sgd", status="running").summary)
    folder.append([line(1, 0.5), {"kind": "layers", "epoch": 1, "step": 10, "train_seconds": 1.0, "layers": []}])
    folder.append([line(2, 0.6)])
    run = load_run(tmp_path)
    assert run.config == {"workload": "w"}
    assert [e["epoch"] for e in run.epochs] == [1, 2]
    assert [e["epoch"] for e in run.layers] == [1]
    assert run.summary["status"] == "running"
    assert run.environment == {}


def test_a_line_cut_by_a_crash_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write(record.CONFIG, {})
    folder.append([line(1, 0.5)])
    with open(tmp_path / record.METRICS, "a") as file:
        file.write('{"kind": "epoch", "epo')
    assert [e["epoch"] for e in load_run(tmp_path).epochs] == [1]


def test_damage_elsewhere_is_said(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write(record.CONFIG, {})
    (tmp_path / record.METRICS).write_text("nonsense\n")
    with pytest.raises(LabError, match=r"metrics\.jsonl is damaged"):
        load_run(tmp_path)
    (tmp_path / record.METRICS).unlink()
    (tmp_path / record.SUMMARY).write_text("{")
    with pytest.raises(LabError, match=r"summary\.json is damaged"):
        load_run(tmp_path)
    (tmp_path / record.CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(LabError, match=r"checkpoint\.pt is damaged"):
        folder.load_checkpoint()


def test_not_a_run_folder(tmp_path):
    with pytest.raises(LabError, match="is not a run folder"):
        load_run(tmp_path)


def test_keep_drops_all_other_steps(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append([line(e, 0.5) for e in (1, 2, 3)])
    folder.keep({10, 20})
    assert [e["epoch"] for e in folder.lines()] == [1, 2]


def test_non_finite_numbers_become_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(
        [{"kind": "layers", "step": 1, "layers": [{"captured_input": float("nan"), "rank": 3}, float("inf")]}]
    )
    text = (tmp_path / record.METRICS).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["layers"] == [{"captured_input": None, "rank": 3}, None]


def test_a_failing_write_keeps_the_old_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"step": 1, "weights": torch.ones(2)})

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(LabError, match=r"checkpoint\.pt cannot be written \(disk full\)"):
        disk.write_atomically(tmp_path / record.CHECKPOINT, fail)
    assert torch.load(tmp_path / record.CHECKPOINT)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [record.CHECKPOINT]


def test_summary_times_the_first_crossing_and_finds_the_best():
    epochs = [line(1, 0.80), line(2, 0.92, 2.5), line(3, 0.90), line(4, 0.91)]
    goals = [Target("test_accuracy", 0.9, "max"), Target("test_accuracy", 0.95, "max"), Target("test_loss", 0.5, "min")]
    summary = summarise({"status": "finished"}, epochs, goals)
    first, second, third = summary["targets"]
    assert (first["reached"], first["seconds"], first["epoch"]) == (True, 2.5, 2)
    assert (second["reached"], second["seconds"], second["epoch"]) == (False, None, None)
    assert (third["epoch"], third["mode"]) == (2, "min")
    assert summary["best"]["epoch"] == 2
    assert summary["final"]["epoch"] == 4


def test_summary_of_nothing():
    summary = summarise({}, [], [Target("test_accuracy", 0.9, "max")])
    assert summary["best"] == summary["final"] == {}


def test_environment_names_versions_and_no_person_or_place():
    found = record.environment(torch.device("cpu"))
    assert (
        found["versions"]["torch"] == torch.__version__.split("+")[0] or found["versions"]["torch"] == torch.__version__
    )
    assert found["threads"] == torch.get_num_threads()
    assert set(found) == {
        "versions",
        "system",
        "machine",
        "processor",
        "device",
        "cpus",
        "processes",
        "threads",
        "date",
    }

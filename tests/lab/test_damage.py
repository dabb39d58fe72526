"""Every file of a run folder, damaged in every way: one sentence that names it, never a traceback, never silence."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile

import pytest
import torch

from rkfac_lab import config, record, train
from rkfac_lab.errors import LabError
from rkfac_lab.record import load_run

from .damage import BYTES, refused


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Where the run of all tests is."""
    return tmp_path_factory.mktemp("once") / "r"


@pytest.fixture
def run_folder(once, tmp_path, tiny):
    """A copy of a run that has ended after two of its epochs, and could go on."""
    if not once.exists():
        train.run(config.load(tiny, ["optimizer.name=rs-kfac", "epochs=2"]), once)
    return shutil.copytree(once, tmp_path / "r")


# --- damage done to the bytes of any file

WHOLE = {
    "a number": "3",
    "a list": "[1, 2]",
    "null": "null",
    "a text": '"finished"',
    "NaN": "NaN",
    "strange keys": '{"editor": "vi", "lines": [[[]]]}',
    "a huge number": "1" * 5000,
}
TEXT_DAMAGE = {**BYTES, **{name: (lambda content, text=text: text.encode() + b"\n") for name, text in WHOLE.items()}}


@pytest.mark.parametrize("damage", TEXT_DAMAGE.values(), ids=TEXT_DAMAGE.keys())
@pytest.mark.parametrize("name", [record.CONFIG, record.SUMMARY, record.METRICS, record.ENVIRONMENT])
def test_damaged_files_of_a_run_are_refused_by_report_and_train(run_folder, rkfac, tmp_path, name, damage):
    path = run_folder / name
    path.write_bytes(damage(path.read_bytes()))
    others = {p: p.read_bytes() for p in run_folder.iterdir() if p != path}
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), name)
    assert not (tmp_path / "page.html").exists()
    if name != record.ENVIRONMENT:  # a continued run writes that anew
        refused(rkfac("train", run_folder, "--resume", "--epochs", 3), name)
        assert {p: p.read_bytes() for p in run_folder.iterdir() if p != path} == others


@pytest.mark.parametrize("name", [record.CONFIG, record.SUMMARY, record.METRICS, record.ENVIRONMENT])
def test_a_run_whose_file_was_mended_goes_on(run_folder, rkfac, tmp_path, name):
    path = run_folder / name
    whole = path.read_bytes()
    path.write_bytes(b"")
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), name)
    if name != record.ENVIRONMENT:
        refused(rkfac("train", run_folder, "--resume", "--epochs", 3), name)
    path.write_bytes(whole)
    assert rkfac("train", run_folder, "--resume", "--epochs", 3)[0] == 0


# --- values that parse, and are none


def changed(content, keys, value):
    """`content` with the value at `keys` replaced, or taken away if `value` is Ellipsis."""
    tree = json.loads(content)
    inner = tree
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return json.dumps(tree)


SUMMARY_KEYS = [
    (("workload",), 3),
    (("workload",), ...),
    (("optimizer",), None),
    (("label",), ["a"]),
    (("seed",), "one"),
    (("status",), "done"),
    (("status",), ...),
    (("steps",), ...),
    (("steps",), -4),
    (("train_seconds",), "long"),
    (("train_seconds",), float("nan")),
    (("targets",), {}),
    (("targets", 0, "value"), "high"),
    (("targets", 0, "mode"), "best"),
    (("targets", 0, "metric"), ...),
    (("targets", 0, "reached"), "yes"),
    (("targets", 0), {"reached": True}),
    (("best",), [1]),
    (("final",), None),
    (("final", "step"), ...),
    (("final", "epoch"), "two"),
    (("final", "step"), 77),
]


@pytest.mark.parametrize("keys, value", SUMMARY_KEYS, ids=lambda part: str(part))
def test_summaries_are_checked_for_structure(run_folder, rkfac, tmp_path, keys, value):
    path = run_folder / record.SUMMARY
    path.write_text(changed(path.read_text(), keys, value))
    name = record.METRICS if value == 77 else record.SUMMARY
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), name)


METRIC_KEYS = [
    (("kind",), "epochs"),
    (("kind",), ...),
    (("epoch",), ...),
    (("epoch",), "two"),
    (("step",), 1.5),
    (("step",), -3),
    (("step",), 10**30),
    (("train_seconds",), ...),
    (("train_seconds",), "1"),
    (("epoch_seconds",), None),
    (("test_loss",), "low"),
    (("test_accuracy",), [0.5]),
    (("train_loss",), float("nan")),
    (("lr",), {"value": 1}),
]


@pytest.mark.parametrize("keys, value", METRIC_KEYS, ids=lambda part: str(part))
def test_metrics_are_checked_for_structure(run_folder, rkfac, tmp_path, keys, value):
    path = run_folder / record.METRICS
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([changed(first, keys, value), *rest]) + "\n")
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), record.METRICS)
    refused(rkfac("train", run_folder, "--resume", "--epochs", 3), record.METRICS)


LAYER_KEYS = [
    (("layers",), {}),
    (("layers",), ...),
    (("layers", 0), "conv1"),
    (("layers", 0, "name"), ...),
    (("layers", 0, "rank_input"), "many"),
    (("layers", 0, "seconds"), [1.0]),
    (("layers", 0, "seconds"), {"apply": "long"}),
    (("layers", 0, "bytes"), {"basis": None}),
    (("train_seconds",), ...),
]


@pytest.mark.parametrize("keys, value", LAYER_KEYS, ids=lambda part: str(part))
def test_records_of_layers_are_checked_for_structure(run_folder, rkfac, tmp_path, keys, value):
    path = run_folder / record.METRICS
    lines = path.read_text().splitlines()
    assert json.loads(lines[1])["kind"] == "layers"
    lines[1] = changed(lines[1], keys, value)
    path.write_text("\n".join(lines) + "\n")
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), record.METRICS)


@pytest.mark.parametrize("kept", [[], [0, 1], [2, 3], [2, 3, 0, 1], [0, 1, 0, 1, 2, 3]], ids=str)
def test_metrics_that_lack_or_repeat_lines_are_refused(run_folder, rkfac, tmp_path, kept):
    path = run_folder / record.METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[number] for number in kept))
    if kept != [2, 3]:  # the first epoch is no business of a page, but one of a run that goes on
        refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), record.METRICS)
    refused(rkfac("train", run_folder, "--resume", "--epochs", 3), record.METRICS)


CONFIG_KEYS = [
    (("workload",), 3),
    (("workload",), {"name": "tiny"}),
    (("optimizer",), "sgd"),
    (("optimizer", "arguments"), [1]),
    (("optimizer", "arguments", "lr"), float("nan")),
    (("schedule",), {"lr": {"soon": 1}}),
    (("epochs",), 2.5),
    (("seed",), 10**40),
    (("threads",), 100000),
    (("editor",), "vi"),
]


@pytest.mark.parametrize("keys, value", CONFIG_KEYS, ids=lambda part: str(part))
def test_configurations_of_runs_are_checked_for_structure(run_folder, rkfac, tmp_path, keys, value):
    path = run_folder / record.CONFIG
    path.write_text(changed(path.read_text(), keys, value))
    refused(rkfac("train", run_folder, "--resume"), record.CONFIG)
    refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), record.CONFIG)


# --- checkpoints


def test_a_flipped_bit_in_a_checkpoint_is_never_accepted(run_folder):
    """Wherever the bit is: what is not refused must be, tensor for tensor, what was saved."""
    path = run_folder / record.CHECKPOINT
    whole = path.read_bytes()
    content = torch.load(io.BytesIO(whole), weights_only=True)
    expected = saved_text(content)
    refusals = []
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found = record.RunFolder(run_folder).load_checkpoint()
        except LabError as error:
            refusals.append(str(error))
        else:
            assert saved_text(found) == expected  # the bit was in the padding between the parts
    assert len(refusals) > 25
    assert all("checkpoint.pt is damaged" in said and "delete it to begin" in said for said in refusals)


def saved_text(value):
    torch.set_printoptions(threshold=10**7, precision=17)
    try:
        return repr(value)
    finally:
        torch.set_printoptions(profile="default")


def test_flipped_bits_in_the_tensors_of_a_checkpoint_are_refused(run_folder, rkfac):
    path = run_folder / record.CHECKPOINT
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = [part for part in archive.infolist() if "/data/" in part.filename and part.file_size][:25]
    assert len(parts) >= 10
    for part in parts:
        name, extra = struct.unpack_from("<HH", whole, part.header_offset + 26)
        place = part.header_offset + 30 + name + extra + part.file_size // 2
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        refused(rkfac("train", run_folder, "--resume", "--epochs", 3), record.CHECKPOINT)
    path.write_bytes(whole)
    assert rkfac("train", run_folder, "--resume", "--epochs", 3)[0] == 0


@pytest.mark.parametrize("damage", BYTES.values(), ids=BYTES.keys())
def test_damaged_checkpoints_are_refused_and_nothing_is_overwritten(run_folder, rkfac, damage):
    path = run_folder / record.CHECKPOINT
    path.write_bytes(damage(path.read_bytes()))
    before = {p.name: p.read_bytes() for p in run_folder.iterdir()}
    refused(rkfac("train", run_folder, "--resume", "--epochs", 3), record.CHECKPOINT)
    assert {p.name: p.read_bytes() for p in run_folder.iterdir()} == before


CHECKPOINT_CHANGES = {
    "a list": lambda state: [1],
    "no model": lambda state: {key: state[key] for key in state if key != "model"},
    "a model of another shape": lambda state: {**state, "model": {"0.weight": torch.zeros(2)}},
    "an optimizer of nothing": lambda state: {**state, "optimizer": {}},
    "another optimizer": lambda state: {**state, "optimizer": {"state": {}, "param_groups": []}},
    "a text as step": lambda state: {**state, "step": "4"},
    "a negative epoch": lambda state: {**state, "epoch": -1},
    "seconds that are none": lambda state: {**state, "train_seconds": float("nan")},
    "no order": lambda state: {**state, "batches": {}},
    "an order of other samples": lambda state: {
        **state,
        "batches": {**state["batches"], "permutation": torch.zeros(24, dtype=torch.long)},
    },
    "a position outside": lambda state: {**state, "batches": {**state["batches"], "position": 99}},
    "a generator of nothing": lambda state: {**state, "batches": {**state["batches"], "generator": torch.zeros(3)}},
    "random numbers of nothing": lambda state: {**state, "random": torch.zeros(3)},
    "random numbers as text": lambda state: {**state, "random": "4"},
}


@pytest.mark.parametrize("change", CHECKPOINT_CHANGES.values(), ids=CHECKPOINT_CHANGES.keys())
def test_checkpoints_are_checked_for_structure(run_folder, rkfac, change):
    path = run_folder / record.CHECKPOINT
    torch.save(change(torch.load(path, weights_only=True)), path)
    refused(rkfac("train", run_folder, "--resume", "--epochs", 3), record.CHECKPOINT)


# --- folders in the place of files


@pytest.mark.parametrize("name", [record.CONFIG, record.SUMMARY, record.METRICS, record.CHECKPOINT])
def test_folders_in_the_place_of_files(run_folder, rkfac, tmp_path, name):
    (run_folder / name).unlink()
    (run_folder / name).mkdir()
    refused(rkfac("train", run_folder, "--resume", "--epochs", 3), name)
    if name != record.CHECKPOINT:
        refused(rkfac("report", run_folder, "--out", tmp_path / "page.html"), name)


@pytest.mark.usefixtures("unadorned")
def test_one_damaged_run_does_not_stop_a_comparison(tmp_path, tiny, rkfac):
    command = ("compare", tiny, "--optimizers", "sgd,adamw", "--seeds", 1, "--epochs", 1, "--out", tmp_path / "c")
    assert rkfac(*command)[0] == 0
    (tmp_path / "c" / "runs" / "sgd-seed0" / record.SUMMARY).write_text("{")
    code, said = rkfac(*command, "--resume")
    assert code == 0
    assert "summary.json is damaged" in "".join(said)
    assert "1 failed: " in (tmp_path / "c" / "table.md").read_text()


def test_a_run_that_was_not_damaged_is_read(run_folder, rkfac, tmp_path):
    """The other tests would pass too if everything were refused."""
    assert rkfac("report", run_folder, "--out", tmp_path / "page.html")[0] == 0
    assert [line["epoch"] for line in load_run(run_folder).epochs] == [1, 2]
    shutil.copytree(run_folder, tmp_path / "copy")
    assert rkfac("train", tmp_path / "copy", "--resume")[0] == 0

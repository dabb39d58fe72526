"""Trouble with the disk: a sentence on the screen, and everything that was saved still there."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys

import pytest
import torch

from rkfac_lab import config, disk, record, train
from rkfac_lab.cli import main
from rkfac_lab.data import download
from rkfac_lab.errors import LabError
from rkfac_lab.progress import Silent
from rkfac_lab.record import load_run

from .handmade import make_run
from .test_report import write_folder

TIMES = ("train_seconds", "cpu_seconds", "epoch_seconds", "eval_seconds")


def chosen(workload, *settings):
    return config.load(workload, ["optimizer.name=sgd", *settings])


def numbers(run):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.epochs]


def rkfac(monkeypatch, capsys, *arguments):
    """Exit code and the lines on the screen."""
    monkeypatch.setattr(sys, "argv", ["rkfac", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err.splitlines()


class FullAfter:
    """An os.fsync that finds the disk full after so many calls."""

    def __init__(self, calls, number=errno.ENOSPC):
        self.left, self.number = calls, number

    def __call__(self, descriptor):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("calls", range(14))
def test_a_disk_that_fails_at_any_write_loses_nothing(tmp_path, tiny, monkeypatch, number, calls):
    """Whichever write fails: one sentence, and with space again the run ends with the numbers of an untroubled one."""
    whole = train.run(chosen(tiny), tmp_path / "whole")
    with monkeypatch.context() as context:
        context.setattr(disk.os, "fsync", FullAfter(calls, number))
        with pytest.raises(LabError, match=r"cannot be written \(.*\); [a-z ]+") as caught:
            train.run(chosen(tiny), tmp_path / "r")
        assert "\n" not in str(caught.value)
        assert disk.ADVICE[number] in str(caught.value)
    left = [path.name for path in (tmp_path / "r").iterdir()] if (tmp_path / "r").exists() else []
    assert set(left) <= set(record.FILES)
    assert numbers(train.run(chosen(tiny), tmp_path / "r", resume=True)) == numbers(whole)


def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_older_one(tmp_path, tiny, monkeypatch, capsys):
    """A real limit on the size of files, which torch.save meets in the middle of its work."""
    train.run(chosen(tiny, "epochs=1"), tmp_path / "r")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code, said = rkfac(monkeypatch, capsys, "train", tmp_path / "r", "--epochs", 2, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert said[-1].startswith(f"rkfac: {tmp_path / 'r' / record.CHECKPOINT} cannot be written (File too large); ")
    assert torch.load(tmp_path / "r" / record.CHECKPOINT, weights_only=True)["step"] == 3
    assert not list((tmp_path / "r").glob(".*"))
    assert load_run(tmp_path / "r").epochs


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    folder = record.RunFolder(tmp_path)
    folder.append([{"kind": "layers", "epoch": 1, "step": 1, "train_seconds": 1.0, "layers": []}])
    before = (tmp_path / record.METRICS).read_bytes()
    monkeypatch.setattr(disk.os, "fsync", FullAfter(0))
    with pytest.raises(LabError, match="free some space"):
        folder.append([{"kind": "layers", "epoch": 2, "step": 2, "train_seconds": 2.0, "layers": []}])
    assert (tmp_path / record.METRICS).read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path, tiny, monkeypatch, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    code, said = rkfac(monkeypatch, capsys, "train", tiny, "--folder", tmp_path / "locked" / "r")
    assert (code, len(said)) == (2, 1)
    assert "Permission denied" in said[0]


def test_a_read_only_disk(tmp_path, tiny, monkeypatch, capsys):
    real = os.open

    def read_only(path, flags, *arguments, **keywords):
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", read_only)
    code, said = rkfac(monkeypatch, capsys, "train", tiny, "--folder", tmp_path / "r")
    assert code == 2
    assert said == [
        f"rkfac: {tmp_path / 'r' / '.lock'} cannot be opened (Read-only file system); "
        "choose a place that can be written to."
    ]


def test_a_folder_deleted_under_a_run(tmp_path, tiny):
    class Deleting(Silent):
        def step(self, epoch, step, loss):
            if step == 4:
                shutil.rmtree(tmp_path / "r")

    with pytest.raises(LabError, match=r"(metrics\.jsonl|summary\.json) cannot be written .*moved or deleted"):
        train.run(chosen(tiny), tmp_path / "r", progress=Deleting())
    assert train.run(chosen(tiny), tmp_path / "r").summary["status"] == "finished"


def test_a_file_in_the_place_of_a_folder(tmp_path, tiny, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    write_folder(make_run("sgd"), tmp_path / "run")
    commands = [
        ("train", tiny, "--folder", tmp_path / "file"),
        ("train", tiny, "--folder", tmp_path / "file" / "r"),
        ("compare", tiny, "--optimizers", "sgd", "--seeds", 1, "--epochs", 1, "--out", tmp_path / "file"),
        ("report", tmp_path / "run", "--out", tmp_path / "file" / "page.html"),
        ("report", tmp_path / "file", "--out", tmp_path / "page.html"),
        ("report", tmp_path / "run", "--out", tmp_path),
        ("data", "get", "cifar10", "--data-dir", tmp_path / "file"),
        ("spectrum", tiny, "--steps-max", 2, "--out", tmp_path / "file"),
        ("train", tiny, "--folder", tmp_path / ("x" * 300)),
        ("train", "x" * 300),
        ("train", tiny, "--set", "tensorboard=true", "--folder", tmp_path / "board"),
        ("bench", "decompose", "--dimensions", "a,b"),
        ("bench", "decompose", "--dimensions", "8", "--rank", 2, "--rounds", 1, "--out", tmp_path / "file" / "b.json"),
    ]
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "tensorboard").write_text("mine")
    for command in commands:
        code, said = rkfac(monkeypatch, capsys, *command)
        assert code == 2, command
        assert said[-1].startswith("rkfac: "), command
        assert "Traceback" not in "".join(said), command
    assert (tmp_path / "file").read_text() == "mine"


def test_what_a_killed_download_left_is_cleaned(tmp_path, monkeypatch):
    (tmp_path / ".unpack-abc").mkdir()
    (tmp_path / ".unpack-abc" / "data_batch_1.bin").write_bytes(b"half")
    (tmp_path / "cifar-10-batches-bin").mkdir()
    download.get("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-bin"]


def test_a_full_disk_ends_a_download_at_once(tmp_path, monkeypatch):
    """Trying again mends a cut connection, not a full disk."""
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(100_000))
    asked = []

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def write(self, chunk):
            asked.append(len(chunk))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = open
    monkeypatch.setattr(
        download, "open", lambda path, mode: Full() if "part" in str(path) else real(path, mode), raising=False
    )
    with pytest.raises(LabError, match=r"source\.bin\.part cannot be written .*free some space"):
        download.fetch(download.RemoteFile(source.as_uri(), "0" * 32), tmp_path / "d")
    assert len(asked) == 1

"""One process at a time in a run folder, whatever becomes of the first one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rkfac_lab import compare, config, train
from rkfac_lab.cli import main
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError
from rkfac_lab.progress import Silent

HOLD = """
import sys, pathlib
from rkfac_lab.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that works in tmp_path/r."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "r")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def one_epoch(workload, *settings):
    return config.load(workload, ["optimizer.name=sgd", "epochs=1", *settings])


def test_a_second_process_is_refused_and_told_whom_to_wait_for(tmp_path, tiny, holder):
    with pytest.raises(LabError, match=rf"r is in use by process {holder.pid}; wait until it ends"):
        train.run(one_epoch(tiny), tmp_path / "r")
    assert not (tmp_path / "r" / "config.json").exists()


def test_a_killed_holder_holds_nothing(tmp_path, tiny, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "r" / ".lock").exists()  # its file stayed, its lock did not
    assert train.run(one_epoch(tiny), tmp_path / "r").summary["status"] == "finished"
    assert not (tmp_path / "r" / ".lock").exists()


def test_two_runs_on_one_folder_at_the_same_time(tmp_path, tiny, monkeypatch, capsys):
    """The second starts while the first is in its training loop, from the command line."""
    said = []

    class StartAnother(Silent):
        def step(self, epoch, step, loss):
            if step == 2:
                settings = ["--set", "optimizer.name=sgd", "--epochs", "1", "--resume"]
                monkeypatch.setattr(sys, "argv", ["rkfac", "train", tiny, *settings, "--folder", str(tmp_path / "r")])
                with pytest.raises(SystemExit) as ended:
                    main()
                said.append((ended.value.code, capsys.readouterr().err))

    run = train.run(one_epoch(tiny), tmp_path / "r", progress=StartAnother())
    [(code, message)] = said
    assert code == 2
    assert message == (
        f"rkfac: {tmp_path / 'r'} is in use by process {os.getpid()}; "
        "wait until it ends, stop it, or choose another folder.\n"
    )
    assert [line["step"] for line in run.epochs] == [3]


def test_two_comparisons_in_one_folder(tmp_path, tiny, holder, monkeypatch):
    monkeypatch.setattr(compare, "warm_up", lambda comparison: None)
    with pytest.raises(LabError, match=f"in use by process {holder.pid}"):
        compare.run(Comparison(tiny, ("sgd",), seeds=1, common={"epochs": 1}), tmp_path / "r")


def test_a_mistake_leaves_no_folder_and_no_lock(tmp_path, tiny):
    with pytest.raises(LabError, match="no optimizer 'sgdd'"):
        train.run(config.load(tiny, ["optimizer.name=sgdd"]), tmp_path / "new" / "r")
    assert not (tmp_path / "new").exists()

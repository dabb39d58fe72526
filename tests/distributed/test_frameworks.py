"""Accelerate, Lightning and the Trainer of transformers, each started as its users start it, with two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.task import (
    ACCUMULATED,
    CLIP,
    HALF,
    PROCESSES,
    SIZE,
    STEPS,
    chosen,
    corpus,
    dataset,
    kept,
    language_model,
    scheduled,
)
from distributed.together import batches, build
from optim.problems import parameters

HERE = Path(__file__).parent
PATIENCE = 240  # seconds that a test waits for its processes
CLOSE = 1e-10

Losses = Callable[[nn.Module, Sequence[Any]], list[Tensor]]  # of the passes of a step


def launch(*command: str, folder: Path) -> None:
    """Run to the end; what the processes said is shown if it is not a good one."""
    # Nothing is fetched, and whoever started the tests is no part of a world of processes.
    ours = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    ours |= {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    ours |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    with (folder / "said.txt").open("w+") as said:
        arguments = [sys.executable, *command, str(folder)]
        process = subprocess.Popen(arguments, cwd=folder, env=ours, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(PATIENCE)
        except BaseException:  # launchers end what they have started when they are asked to, not when they are killed
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        said.seek(0)
        assert code == 0, said.read()


def whole(
    model: nn.Module, epochs: Sequence[Any], losses: Losses, passes: int = 1, ticks: int = 1
) -> dict[str, Tensor]:
    """Parameters after one process has trained on whole batches, in a loop of torch's own."""
    optimizer = chosen(model)
    scheduler = scheduled(optimizer)
    for data in epochs:
        for first in range(0, len(data), passes):
            for loss in losses(model, data[first : first + passes]):
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(ticks):
                scheduler.step()
    return parameters(model)


def check(folder: Path, name: str, expected: dict[str, Tensor], start: nn.Module) -> None:
    first, second = kept(folder, name)
    before = parameters(start)
    assert max(float((expected[which] - before[which]).abs().max()) for which in before) > 1e-2
    assert first["covered"], f"{name}: report() covers nothing"
    assert first["covered"] == second["covered"], name
    assert first["parameters"].keys() == expected.keys()
    for which, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][which]), f"{name}: {which} differs between the processes"
        difference = float((value - expected[which]).abs().max())
        assert difference < CLOSE, f"{name}: {which} differs from one process by {difference}"


def classified(folder: Path, epochs: Sequence[Any], runs: dict[str, int], ticks: int = 1) -> None:
    """Runs of the small classifier, by name with their passes a step."""
    for name, passes in runs.items():

        def losses(model: nn.Module, some: Sequence[Any], passes: int = passes) -> list[Tensor]:
            """Every pass counts as much, however many there are."""
            return [F.cross_entropy(model(x), y) / passes for x, y in some]

        check(folder, name, whole(build("reader"), epochs, losses, passes, ticks), build("reader"))


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    # Its --cpu needs mpirun for more than one process: the script says cpu=True instead.
    options = ["--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    start = ["-m", "accelerate.commands.launch", *options, f"--num_processes={PROCESSES}", "--main_process_port=0"]
    launch(*start, str(HERE / "with_accelerate.py"), folder=tmp_path)
    runs = {"plain": 1, "accumulated": ACCUMULATED, "resumed": 1}
    # Its schedulers tick once for every process.
    classified(tmp_path, [batches("reader", STEPS, SIZE)], runs, ticks=PROCESSES)


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    launch(str(HERE / "with_lightning.py"), folder=tmp_path)
    x, y = dataset(HALF).tensors
    epochs = []
    for epoch in range(2):  # Lightning puts a shuffling DistributedSampler in the place of the loader's
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        epochs.append(list(zip(x[order].split(SIZE), y[order].split(SIZE), strict=True)))
    classified(tmp_path, epochs, {"plain": 1, "accumulated": ACCUMULATED, "resumed": 1, "by hand": 1})


def token_losses(model: nn.Module, some: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Every token of a step counts as much, whichever pass and process it is in."""
    tokens = sum((batch["labels"] != -100).sum() for batch in some)
    return [model(**batch, num_items_in_batch=tokens).loss for batch in some]


def gathered(samples: Sequence[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    parts = [samples[first : first + size] for first in range(0, len(samples), size)]
    return [{key: torch.stack([one[key] for one in some]) for key in some[0]} for some in parts]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
    launch(*start, str(HERE / "with_trainer.py"), folder=tmp_path)
    data = gathered(corpus(), SIZE)
    for name, passes in {"plain": 1, "accumulated": ACCUMULATED, "resumed": 1}.items():
        check(tmp_path, name, whole(language_model(), [data], token_losses, passes), language_model())
    # A table that is read once for all samples of a pass has one gradient a pass: processes are passes to it.
    shares = gathered(corpus(positions=False), SIZE // PROCESSES)
    check(tmp_path, "by class", whole(language_model(), [shares], token_losses, PROCESSES, 0), language_model())

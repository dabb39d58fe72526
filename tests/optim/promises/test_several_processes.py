"""Several processes are refused whenever they appear: replicas with statistics of their own would drift apart."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn

import rkfac
from optim.problems import mlp, parameters, rows


def _rank(rank: int, folder: str) -> None:
    """The order of Lightning and of many scripts: the optimizer first, the processes afterwards."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = mlp()
    optimizer = rkfac.RSKFAC(model, lr=0.1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        start, (x, y) = parameters(model), rows()
        F.cross_entropy(model(x), y).backward()
        try:
            optimizer.step()
            said = "stepped"
        except ValueError as error:
            said = str(error)
        moved = any(not torch.equal(value, start[name]) for name, value in parameters(model).items())
        try:
            rkfac.RSKFAC(mlp())
            again = "built"
        except ValueError as error:
            again = str(error)
        Path(folder, f"rank{rank}").write_text(f"{said}\n{moved}\n{again}\n")
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_that_meet_after_the_optimizer_was_built_are_refused_in_step(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        said, moved, again = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert "2 processes" in said
        assert "drift apart" in said
        assert moved == "False"
        assert "2 processes" in again


def test_one_process_in_a_group_of_one_trains(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = mlp()
        optimizer = rkfac.RSKFAC(model, rank=3)
        start, (x, y) = parameters(model), rows()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert all(not torch.equal(value, start[name]) for name, value in parameters(model).items())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.Sequential(nn.DataParallel(m))], ids=["root", "inside"])
def test_data_parallel_is_refused_by_the_constructor(wrap: type[nn.DataParallel]) -> None:
    with pytest.raises(ValueError, match=r"DataParallel.*not supported"):
        rkfac.RSKFAC(wrap(mlp()))


def test_data_parallel_around_a_model_with_an_optimizer_is_refused_in_step() -> None:
    """Without GPUs the wrapper runs the model itself, so its replicas are made by hand, as parallel_apply gets them."""
    model = mlp()
    optimizer = rkfac.RSKFAC(model)
    replica = mlp()
    replica.load_state_dict(model.state_dict())
    for copied, original in zip(replica.modules(), model.modules(), strict=True):
        copied._forward_hooks = original._forward_hooks
        copied._forward_hooks_with_kwargs = original._forward_hooks_with_kwargs
        copied._is_replica = True
    start, (x, y) = parameters(model), rows()
    F.cross_entropy(replica(x), y).backward()
    with pytest.raises(RuntimeError, match="DataParallel"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())

"""One process in a group of its own, and replicas inside one process, which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

import rkfac
from optim.problems import mlp, parameters, rows


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

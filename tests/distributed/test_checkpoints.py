"""torch.distributed.checkpoint and get_optimizer_state_dict, which read `state` and `param_groups` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from distributed.crew import Crew
from distributed.together import batches, build, even, flat, made, same_everywhere, steps_of
from optim.problems import assert_same_parameters, train

MEMBERS = ["RSKFAC", "recommended", "graft-adamw", "EKFAC", "KLDWRM", "BKFAC", "SENG", "stale"]


@pytest.mark.parametrize("optimizer", MEMBERS)
@pytest.mark.parametrize("model", ["convnet", "reader"])
def test_a_state_by_names_goes_on_bit_for_bit(optimizer: str, model: str, tmp_path: Path) -> None:
    data = batches(model, 12, 12)
    first, second = build(model), build(model)
    own = made(optimizer, first)
    train(first, own, data[:7])
    torch.save((first.state_dict(), get_optimizer_state_dict(first, own)), tmp_path / "saved.pt")
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    second.load_state_dict(weights)
    other = made(optimizer, second)
    set_optimizer_state_dict(second, other, state)
    train(first, own, data[7:])
    train(second, other, data[7:])
    assert_same_parameters(second, first, exactly=True)


@pytest.mark.parametrize("optimizer", ["RSKFAC", "recommended", "graft-adamw", "EKFAC"])
def test_a_new_optimizer_is_filled_by_a_distributed_checkpoint(optimizer: str, tmp_path: Path) -> None:
    data = batches("convnet", 12, 12)
    first, second = build("convnet"), build("convnet")
    own = made(optimizer, first)
    train(first, own, data[:7])
    weights, state = get_state_dict(first, own)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other = made(optimizer, second)
    _fill(second, other, tmp_path)
    train(first, own, data[7:])
    train(second, other, data[7:])
    assert_same_parameters(second, first, exactly=True)


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As torch's tutorial does it."""
    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def saved_together(optimizer: str, folder: str, before: int, after: int) -> Any:
    model = build("convnet")
    net = DistributedDataParallel(model)
    own = made(optimizer, net)
    data, cuts = batches("convnet", before + after, 12), even(12, distributed.get_world_size())
    for _ in steps_of(net, own, data[:before], cuts):
        pass
    weights, state = get_state_dict(net, own)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    for _ in steps_of(net, own, data[before:], cuts):
        pass
    return flat(model)


def resumed_together(optimizer: str, folder: str, before: int, after: int) -> Any:
    model = build("convnet")
    net = DistributedDataParallel(model)
    own = made(optimizer, net)
    _fill(net, own, Path(folder))
    data = batches("convnet", before + after, 12)[before:]
    for _ in steps_of(net, own, data, even(12, distributed.get_world_size())):
        pass
    return flat(model), same_everywhere(flat(model))


@pytest.mark.parametrize("optimizer", ["RSKFAC", "recommended"])
def test_saved_by_two_and_filled_into_two_and_four(pair: Crew, crew: Crew, optimizer: str, tmp_path: Path) -> None:
    end, _ = pair.run(saved_together, optimizer, str(tmp_path), 7, 6)
    for got, equal in crew.run(resumed_together, optimizer, str(tmp_path), 7, 6):
        assert equal
        torch.testing.assert_close(got, end, rtol=0, atol=0.0 if crew.size == 2 else 1e-10)


@pytest.mark.parametrize("optimizer", ["RSKFAC", "graft-adamw", "recommended"])
def test_asking_a_new_optimizer_for_its_state_is_no_step(optimizer: str) -> None:
    """torch takes a step without gradients to see the buffers."""
    first, second = build("convnet"), build("convnet")
    own, other = made(optimizer, first, weight_decay=0.1), made(optimizer, second, weight_decay=0.1)
    get_optimizer_state_dict(first, own)
    data = batches("convnet", 6, 12)
    train(first, own, data)
    train(second, other, data)
    assert_same_parameters(first, second, exactly=True)


def test_a_state_of_another_algorithm_is_refused_and_changes_nothing() -> None:
    first, second = build("mlp"), build("mlp")
    own, other = made("RSKFAC", first), made("EKFAC", second)
    train(first, own, batches("mlp", 3, 12))
    train(second, other, batches("mlp", 3, 12))
    state, before = get_optimizer_state_dict(first, own), flat(second)
    with pytest.raises(ValueError, match="another algorithm"):
        set_optimizer_state_dict(second, other, state)
    assert torch.equal(flat(second), before)

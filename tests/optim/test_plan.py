"""What a coming step collects is decided once a step, and again when somebody changed what decides it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rkfac


def test_a_step_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    plan = rkfac.KFAC._plan
    monkeypatch.setattr(rkfac.KFAC, "_plan", lambda self: (plans.append(1), plan(self))[1])
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    optimizer = rkfac.KFAC(model)
    plans.clear()
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        assert len(plans) == step
    optimizer.param_groups[0]["factor_every"] = 1  # as a scheduler does
    optimizer.zero_grad()
    assert len(plans) == 4
    assert all(block.wanted for block in optimizer._blocks.values())
    model[0].weight.requires_grad_(False)
    optimizer.zero_grad()
    assert len(plans) == 5


def stepped(optimizer: rkfac.KFAC, model: nn.Module) -> list[torch.Tensor]:
    """How far every parameter went."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().sum().backward()
    optimizer.step()
    return [(p.detach() - b).abs().sum() for p, b in zip(model.parameters(), before, strict=True)]


def test_a_group_that_was_replaced_or_emptied_counts_from_the_next_zero_grad_on() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    optimizer = rkfac.KFAC(model, lr=0.01)
    stepped(optimizer, model)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.0}
    assert not any(stepped(optimizer, model))
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.01}
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    moved = stepped(optimizer, model)
    assert all(moved[:2])
    assert not any(moved[2:])


def test_a_closure_that_fails_does_not_switch_statistics_off() -> None:
    model = nn.Linear(4, 2)
    rule = rkfac.LevenbergMarquardt(every=1)
    optimizer = rkfac.KFAC(model, lr=0.01, graft=None, adaptive_damping=rule, factor_every=1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more data")
        optimizer.zero_grad()
        value = model(torch.randn(6, 4)).square().mean()
        if torch.is_grad_enabled() and value.requires_grad:
            value.backward()
        return value

    with pytest.raises(RuntimeError, match="no more data"):
        optimizer.step(closure)
    before = optimizer._blocks[""].input.updates
    optimizer.step(closure)
    assert optimizer._blocks[""].input.updates == before + 1


def test_what_is_the_same_for_all_is_refused_in_a_group() -> None:
    model = nn.Linear(4, 2)
    for name, value in {"power": -0.5, "graft": "adamw", "rows": 3}.items():
        with pytest.raises(ValueError, match=name):
            rkfac.KFAC(model, params=[{"params": list(model.parameters()), name: value}])

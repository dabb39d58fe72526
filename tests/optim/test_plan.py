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

"""Layers take turns: every step of a period has about the same to do."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim import stated
from optim.problems import mlp, rows, step, train
from rkfac.optim.stagger import offsets


@pytest.mark.parametrize("period", [1, 2, 5, 50])
@pytest.mark.parametrize("layers", [1, 3, 12, 60])
def test_equal_layers_are_spread_evenly(layers: int, period: int) -> None:
    chosen = offsets((7.0,) * layers, period)
    counts = Counter(chosen)
    assert set(counts) <= set(range(period))
    assert len(counts) == min(layers, period)
    assert max(counts.values()) - min(counts.values()) <= 1
    gaps = [b - a for a, b in zip(sorted(counts), [*sorted(counts)[1:], period], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_the_dearest_layer_shares_its_step_with_as_little_as_possible() -> None:
    costs = (1.0, 1.0, 10.0, 4.0, 3.0, 2.0)
    chosen = offsets(costs, 3)
    loads = [sum(c for c, at in zip(costs, chosen, strict=True) if at == k) for k in range(3)]
    assert sorted(loads) == [5.0, 6.0, 10.0]


def deep(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)), nn.Linear(6, 4)).double()


def refreshes(optimizer: rkfac.KFAC) -> dict[str, int]:
    return {name: block["version"] for name, block in optimizer.state_dict()["curvature"]["blocks"].items()}


def counted(steps: int, **keywords: Any) -> list[int]:
    """How many layers were refreshed at each step."""
    model = deep()
    optimizer = stated.KFAC(model, lr=0.01, factor_every=1, stagger=True, **keywords)
    counts, before = [], 0
    for _ in range(steps):
        step(model, optimizer, rows())
        counts.append(sum(refreshes(optimizer).values()) - before)
        before += counts[-1]
    return counts


def test_first_all_together_and_then_one_after_the_other() -> None:
    counts = counted(43, inverse_every=14)
    assert counts[0] == 7
    assert counts[14:42] == [1, 0] * 14
    assert set(counted(9, inverse_every=3)[3:]) == {2, 3}


def test_while_young_all_are_due_together() -> None:
    counts = counted(10, inverse_every=14, eager_start=True)
    assert [k for k, n in enumerate(counts) if n == 7] == [0, 1, 2, 3, 4, 6, 9]


def test_every_layer_is_refreshed_once_a_period() -> None:
    model = deep()
    optimizer = stated.KFAC(model, lr=0.01, factor_every=1, inverse_every=5, stagger=True)
    train(model, optimizer, [rows() for _ in range(5)])
    before = refreshes(optimizer)
    train(model, optimizer, [rows() for _ in range(5)])
    assert refreshes(optimizer) == {name: n + 1 for name, n in before.items()}


def test_groups_with_other_periods_take_turns_among_themselves() -> None:
    model = deep(3)
    groups = [{"params": model[:2].parameters(), "inverse_every": 2}, {"params": model[2:].parameters()}]
    optimizer = stated.KFAC(model, lr=0.01, params=groups, factor_every=1, inverse_every=4, stagger=True)
    train(model, optimizer, [rows() for _ in range(4)])
    before = refreshes(optimizer)
    train(model, optimizer, [rows() for _ in range(4)])
    assert [n - m for n, m in zip(refreshes(optimizer).values(), before.values(), strict=True)] == [2, 2, 1, 1]


def test_where_the_factors_stand_still_it_changes_nothing() -> None:
    batch, bases = rows(), []
    for stagger in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = stated.KFAC(model, lr=0.0, factor_every=1, inverse_every=3, stagger=stagger)
        for _ in range(7):
            step(model, optimizer, batch)
        blocks = optimizer.state_dict()["curvature"]["blocks"]
        bases.append([f["basis"]["U"] for b in blocks.values() for f in b["factors"].values()])
    for plain, staggered in zip(*bases, strict=True):
        torch.testing.assert_close(staggered.abs(), plain.abs(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("at", [1, 5, 8])
def test_a_resumed_run_keeps_the_turns(at: int) -> None:
    torch.manual_seed(0)
    batches = [rows() for _ in range(14)]
    settings: dict[str, Any] = {"lr": 0.05, "factor_every": 2, "inverse_every": 4, "stagger": True, "rank": 3}
    model = deep()
    optimizer = stated.RSKFAC(model, **settings)
    train(model, optimizer, batches[:at])
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = deep()
    resumed = stated.RSKFAC(other, **settings)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    train(model, optimizer, batches[at:])
    train(other, resumed, batches[at:])
    assert refreshes(optimizer) == refreshes(resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    together = stated.RSKFAC(deep(), **{**settings, "stagger": False})
    with pytest.raises(ValueError, match="stagger"):
        together.load_state_dict(optimizer.state_dict())

"""While averages are young they are looked at more often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from optim import stated
from optim.problems import mlp, rows, step
from rkfac.curvature.randomness import subset


def history(steps: int, **keywords: Any) -> tuple[list[int], list[int]]:
    """The steps that took statistics, and those that made inverses."""
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, **keywords)
    statistics, inverses = [], []
    seen = made = 0
    for k in range(steps):
        step(model, optimizer, rows())
        block = optimizer.state_dict()["curvature"]["blocks"]["2"]
        updates, version = block["factors"]["output"]["updates"], block["version"]
        if updates > seen:
            statistics.append(k)
        if version > made:
            inverses.append(k)
        seen, made = updates, version
    return statistics, inverses


def test_every_step_while_young_and_half_of_the_age_until_the_period_and_the_periods_from_then_on() -> None:
    statistics, inverses = history(65, eager_start=True, factor_every=3, inverse_every=12)
    assert statistics == [*range(50), 51, 54, 57, 60, 63]
    assert inverses == [0, 1, 2, 3, 4, 6, 9, 12, 13, 19, 24, 36, 48, 60]


def test_without_it_the_periods_alone_count() -> None:
    statistics, inverses = history(26, eager_start=False, factor_every=6, inverse_every=12)
    assert statistics == [0, 6, 12, 18, 24]
    assert inverses == [0, 12, 24]


@pytest.mark.parametrize("period", [1, 2, 3, 7, 8, 50])
def test_what_is_due(period: int) -> None:
    eager = stated.KFAC(mlp(), eager_start=True)._settings
    patient = replace(eager, eager_start=False)
    young = {0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42, 63, 94}
    for k in range(130):
        assert patient.due(k, period) == (k % period == 0)
        assert eager.due(k, period) == (k % period == 0 or (k // 2 < period and k in young))


def test_a_period_that_grows_later_does_not_make_the_run_young_again() -> None:
    """Steps count from the start of the run, so a longer period only ever adds its own young steps."""
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, eager_start=True, factor_every=2, inverse_every=2)
    for _ in range(89):
        step(model, optimizer, rows())
    optimizer.param_groups[0].update(factor_every=8, inverse_every=8)
    optimizer.zero_grad()
    before = optimizer.state_dict()["curvature"]["blocks"]["2"]["version"]
    for _ in range(6):  # steps 89 to 94, and 94 would be one of a longer period
        step(model, optimizer, rows())
    assert optimizer.state_dict()["curvature"]["blocks"]["2"]["version"] == before


def test_statistics_that_are_due_for_youth_alone_draw_a_fourth_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import rkfac.curvature.block.base as room

    asked: list[tuple[int, int]] = []

    def noted(count: int, most: int, generator: torch.Generator) -> torch.Tensor:
        asked.append((count, most))
        return subset(count, most, generator)

    monkeypatch.setattr(room, "subset", noted)
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, eager_start=True, factor_every=4, rows=8, exclude=("0", "4"))
    for _ in range(10):
        step(model, optimizer, rows(n=20))
    assert asked == [(20, most) for most in (8, 2, 2, 2, 8, 2, 2, 2, 8, 2)]


def test_a_layer_that_joins_late_begins_with_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import rkfac.curvature.block.base as room

    asked = []
    monkeypatch.setattr(room, "subset", lambda n, m, generator: asked.append(m) or torch.arange(m))
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, eager_start=True, factor_every=4, rows=8, exclude=("0", "4"))
    model[2].weight.requires_grad_(False)
    for _ in range(5):
        step(model, optimizer, rows(n=20))
    model[2].weight.requires_grad_(True)
    for _ in range(2):
        step(model, optimizer, rows(n=20))
    assert asked == [8, 2]

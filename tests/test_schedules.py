from __future__ import annotations

import pytest
import torch
from torch import nn

import rkfac
from rkfac.schedules import Polynomial, Scheduler, Steps


def test_the_papers_schedules_are_its_indicator_formulas_at_every_epoch() -> None:
    s = rkfac.paper_schedules()
    for e in range(1, 51):
        lr = (
            0.3
            - 0.1 * (e >= 2)
            - 0.1 * (e >= 3)
            - 0.07 * (e >= 13)
            - 0.02 * (e >= 18)
            - 0.007 * (e >= 27)
            - 0.002 * (e >= 40)
        )
        assert s["lr"](e) == pytest.approx(lr)
        assert s["damping"](e) == pytest.approx(0.1 - 0.05 * (e >= 25) - 0.04 * (e >= 35))
        assert s["inverse_every"](e) == 50 - 20 * (e >= 20)
        assert s["rank"](e) == 220 + 10 * (e >= 15)
        assert s["oversampling"](e) == 10 + (e >= 22) + (e >= 30)


def test_the_preset_starts_where_the_schedules_do() -> None:
    defaults = rkfac.paper_defaults()
    assert all(defaults[name] == schedule(1) for name, schedule in rkfac.paper_schedules().items())
    rkfac.RSKFAC(nn.Linear(3, 2), **defaults)


def test_a_scheduler_sets_every_group_and_resumes() -> None:
    model = nn.Linear(3, 2)
    optimizer = rkfac.KFAC(model, params=[{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.1}])
    scheduler = Scheduler(optimizer, damping=Steps({1: 0.1, 3: 0.05}), lr=lambda epoch: 1 / epoch)
    seen = []
    for _ in range(3):
        seen.append([(g["damping"], g["lr"]) for g in optimizer.param_groups])
        scheduler.step()
    assert seen == [[(0.1, 1.0)] * 2, [(0.1, 0.5)] * 2, [(0.05, 1 / 3)] * 2]
    other = Scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=9.0), lr=lambda epoch: 1 / epoch)
    other.load_state_dict(scheduler.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.25


def test_bad_schedules_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="epoch 1"):
        Steps({2: 0.1})
    with pytest.raises(ValueError, match="counted from 1"):
        Steps({0: 0.1, 1: 0.2})
    with pytest.raises(ValueError, match=r"'dampin'.*damping"):
        Scheduler(rkfac.KFAC(nn.Linear(2, 2)), dampin=Steps({1: 0.1}))


def test_a_polynomial_goes_down_to_zero_by_epochs_and_parts_of_them() -> None:
    schedule = Polynomial(0.05, 75, 6)
    assert schedule(1) == 0.05
    assert schedule(26) == pytest.approx(0.05 * (2 / 3) ** 6)
    assert schedule(1 + 3 / 196) == pytest.approx(0.05 * (1 - 3 / 196 / 75) ** 6)
    assert schedule(76) == schedule(100) == 0.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    Scheduler(optimizer, lr=schedule).step()
    assert optimizer.param_groups[0]["lr"] == schedule(2)


@pytest.mark.parametrize(
    "bad", [{"start": 0}, {"epochs": -1}, {"power": "x"}, {"power": True}, {"epochs": float("inf")}]
)
def test_a_polynomial_of_nonsense_is_refused_by_name(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        Polynomial(**{"start": 0.1, "epochs": 10, "power": 2, **bad})  # type: ignore[arg-type]

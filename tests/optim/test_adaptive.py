"""Levenberg-Marquardt damping, on problems whose quadratic model is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import assert_same_parameters, mlp, parameters, rows, twin, updates


class Recorder(rkfac.LevenbergMarquardt):
    """Remembers what it was asked."""

    asked: list[tuple[float, float]]

    def adapted(self, damping: float, actual: float, predicted: float) -> float:
        self.asked.append((actual, predicted))
        return super().adapted(damping, actual, predicted)


def recorder(**settings: Any) -> Recorder:
    made = Recorder(**settings)
    object.__setattr__(made, "asked", [])
    return made


def regression(residual: float) -> tuple[nn.Module, Tensor, Tensor]:
    """One output and residuals of one size: the empirical Fisher is residual^2 times the exact Hessian."""
    model = nn.Linear(4, 1).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    signs = torch.where(torch.arange(20) % 3 == 0, 1.0, -1.0).double()[:, None]
    return model, x, model(x).detach() + residual * signs


def closure_for(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, sign: float = 1.0) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sign * 0.5 * (model(x) - y).square().mean()
        loss.backward()
        return loss

    return closure


SETTINGS: dict[str, Any] = {"graft": None, "momentum": 0.0, "kl_clip": None, "factor_every": 1, "inverse_every": 1}
SETTINGS |= {"relative_to": None, "factor_start": "unbiased", "lr": 1.0, "update_clip": None}


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
def test_an_exact_model_predicts_the_change_and_the_damping_falls(rule: str) -> None:
    model, x, y = regression(1.0)
    rule_of_thumb = recorder(every=1, factor=0.9)
    optimizer = stated.KFAC(model, damping=1e-4, damping_rule=rule, adaptive_damping=rule_of_thumb, **SETTINGS)
    optimizer.step(closure_for(model, optimizer, x, y))
    ((actual, predicted),) = rule_of_thumb.asked
    assert actual < 0
    assert actual / predicted == pytest.approx(1.0, abs=0.05 if rule == "pi" else 1e-3)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(1e-4 * 0.9)


def test_an_overconfident_model_raises_the_damping() -> None:
    """Residuals of 0.1 make the empirical Fisher a hundred times too small, so the step overshoots."""
    model, x, y = regression(0.1)
    rule = recorder(every=1, factor=0.9)
    optimizer = stated.KFAC(model, damping=1e-6, damping_rule="product", adaptive_damping=rule, **SETTINGS)
    optimizer.step(closure_for(model, optimizer, x, y))
    ((actual, predicted),) = rule.asked
    assert predicted < 0 < actual
    assert optimizer.param_groups[0]["damping"] == pytest.approx(1e-6 / 0.9)


def test_the_damping_moves_only_every_so_often_and_by_that_power() -> None:
    model, x, y = regression(1.0)
    optimizer = stated.KFAC(
        model, damping=0.1, adaptive_damping=rkfac.LevenbergMarquardt(every=3, factor=0.8), **{**SETTINGS, "lr": 0.01}
    )
    seen = []
    for _ in range(6):
        optimizer.step(closure_for(model, optimizer, x, y))
        seen.append(optimizer.param_groups[0]["damping"])
    assert seen[:2] == [0.1, 0.1]
    assert seen[2] == seen[3] == seen[4] != 0.1
    assert seen[2] in (pytest.approx(0.1 * 0.8**3), pytest.approx(0.1 / 0.8**3))
    assert seen[5] != seen[4]


def test_maximising_adapts_like_minimising_the_negated_loss() -> None:
    model, x, y = regression(0.7)
    other = twin(model)
    rules = recorder(every=1), recorder(every=1)
    up = stated.KFAC(model, maximize=True, adaptive_damping=rules[0], **SETTINGS)
    down = stated.KFAC(other, adaptive_damping=rules[1], **SETTINGS)
    for _ in range(3):
        up.step(closure_for(model, up, x, y, sign=-1.0))
        down.step(closure_for(other, down, x, y))
    torch.testing.assert_close(torch.tensor(rules[0].asked), torch.tensor(rules[1].asked))
    assert up.param_groups[0]["damping"] == down.param_groups[0]["damping"]
    assert_same_parameters(model, other)


def test_the_second_look_at_the_loss_leaves_no_statistics() -> None:
    """A rule that never moves the damping must train exactly as none."""
    model = mlp()
    other = twin(model)
    still = rkfac.LevenbergMarquardt(every=1, smallest=0.1, largest=0.1)
    watched = stated.KFAC(model, damping=0.1, adaptive_damping=still, factor_every=1, inverse_every=1)
    plain = stated.KFAC(other, damping=0.1, factor_every=1, inverse_every=1)
    for x, y in (rows() for _ in range(3)):
        for m, o in ((model, watched), (other, plain)):

            def closure(m: nn.Module = m, o: Any = o, x: Tensor = x, y: Tensor = y) -> Tensor:
                o.zero_grad()
                loss = nn.functional.cross_entropy(m(x), y)
                loss.backward()
                return loss

            o.step(closure)
    assert_same_parameters(model, other, exactly=True)
    seen = updates(watched)
    assert seen == {3}


def test_a_step_without_closure_is_refused_at_once_and_changes_nothing() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, adaptive_damping=rkfac.LevenbergMarquardt(every=5))
    start, (x, y) = parameters(model), rows()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


@pytest.mark.parametrize("bad", [{"every": 0}, {"factor": 1.0}, {"factor": 0.0}, {"smallest": 0.0}, {"largest": -1.0}])
def test_bad_settings_are_refused_by_name(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        rkfac.LevenbergMarquardt(**bad)


def test_a_nan_after_the_step_counts_as_a_bad_prediction() -> None:
    rule = rkfac.LevenbergMarquardt(every=1, factor=0.5)
    assert rule.adapted(0.1, float("nan"), -1.0) == pytest.approx(0.2)
    assert rule.adapted(0.1, -1.0, 1.0) == pytest.approx(0.2)
    assert rule.adapted(0.1, -1.0, -1.0) == pytest.approx(0.05)
    assert rule.adapted(0.1, -0.5, -1.0) == pytest.approx(0.1)

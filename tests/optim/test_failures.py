"""When a decomposition fails or a statistic is not finite: what is kept, what is said, what can be saved."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import averages, mlp, parameters, rows, same, step, train, twin
from rkfac import linalg
from rkfac.linalg import LowRank


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, layer: str) -> Iterator[None]:
    """The eigensolver gives up on one layer's output factor."""
    exact = linalg.eigh

    def eigh(X: Tensor, *rest: Any, name: str = "", **keywords: Any) -> LowRank:
        if f"output factor of {layer!r}" in name:
            raise linalg.DecompositionError(f"{name} did not converge")
        return exact(X, *rest, name=name, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(linalg, "eigh", eigh)
        yield


def bases(optimizer: rkfac.KFAC, layer: str) -> dict[str, Any]:
    factors = optimizer.state_dict()["curvature"]["blocks"][layer]["factors"]
    return {side: copy.deepcopy(factor["basis"]) for side, factor in factors.items()}


EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


def test_a_failure_keeps_the_previous_basis_of_that_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows()])
    failed, healthy = bases(optimizer, "2"), bases(optimizer, "0")
    start = parameters(model)
    with failing(monkeypatch, "2"), pytest.warns(UserWarning, match=r"'2'.*previous basis is kept"):
        train(model, optimizer, [rows()])
    assert same(bases(optimizer, "2"), failed), "both sides of the failed layer must stay as they were"
    assert not same(bases(optimizer, "0"), healthy)
    assert all(not torch.equal(value, start[name]) for name, value in parameters(model).items())
    assert {r.name: r.failures for r in optimizer.report()} == {"0": 0, "2": 1, "4": 0}
    train(model, optimizer, [rows()])
    assert {r.name: r.failures for r in optimizer.report()} == {"0": 0, "2": 0, "4": 0}
    assert not same(bases(optimizer, "2"), failed)


def test_a_layer_that_never_succeeded_takes_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.1, momentum=0.0, **EVERY)
    start = parameters(model)
    with failing(monkeypatch, "2"), pytest.warns(UserWarning, match=r"'2'.*plain steps"):
        train(model, optimizer, [rows()])
    torch.testing.assert_close(model[2].weight.detach(), start["2.weight"] - 0.1 * model[2].weight.grad)


def test_failures_in_a_row_end_in_an_error_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, max_failures=3, **EVERY)
    train(model, optimizer, [rows()])
    with failing(monkeypatch, "4"):
        for _ in range(2):
            with pytest.warns(UserWarning, match="'4'"):
                train(model, optimizer, [rows()])
        start = parameters(model)
        with pytest.raises(RuntimeError, match=r"'4'.*3 times in a row") as caught:
            train(model, optimizer, [rows()])
        assert "did not converge" in str(caught.value)
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())
    # What the message promises: save now, go on later.
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    fresh = mlp()
    fresh.load_state_dict(model_state)
    resumed = stated.KFAC(fresh, max_failures=3, **EVERY)
    resumed.load_state_dict(optimizer_state)
    batch = rows()
    assert step(fresh, resumed, batch) == step(model, optimizer, batch)
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert all(report.failures == 0 for report in resumed.report())


def test_a_success_in_between_forgives_earlier_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, max_failures=2, **EVERY)
    train(model, optimizer, [rows()])
    for _ in range(3):
        with failing(monkeypatch, "0"), pytest.warns(UserWarning, match="'0'"):
            train(model, optimizer, [rows()])
        assert [report.failures for report in optimizer.report() if report.name == "0"] == [1]
        train(model, optimizer, [rows()])
        assert all(report.failures == 0 for report in optimizer.report())


def test_float32_factors_are_retried_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(dtype=torch.float32)
    other, batch = twin(model), rows(dtype=torch.float32)
    optimizer, plain = stated.KFAC(model, **EVERY), stated.KFAC(other, **EVERY)
    solver, tried = torch.linalg.eigh, []

    def eigh(X: Tensor, *rest: Any) -> Any:
        tried.append(X.dtype)
        if X.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return solver(X, *rest)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(torch.linalg, "eigh", eigh)
        step(model, optimizer, batch)
    step(other, plain, batch)
    assert tried.count(torch.float64) == 6
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Poison(nn.Module):
    """The identity forward; its backward sends something else to the layers before it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if self.on:
            y.register_hook(lambda g: torch.full_like(g, self.value))
        return y


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("kl_clip", [1e-2, None], ids=["kl_clip", "unclipped"])
def test_a_statistic_that_is_not_finite_never_enters_the_average(value: float, kl_clip: float | None) -> None:
    poison = Poison(value)
    model = nn.Sequential(nn.Linear(6, 5), poison, nn.Tanh(), nn.Linear(5, 4))
    optimizer = stated.KFAC(model, momentum=0.0, kl_clip=kl_clip, update_clip=None, factor_start="unbiased", **EVERY)
    train(model, optimizer, [rows(dtype=torch.float32)])
    before, start = averages(optimizer), parameters(model)
    poison.on = True
    with pytest.warns(UserWarning, match=r"NaN or Inf.*'0'") as caught:
        train(model, optimizer, [rows(dtype=torch.float32)])
    assert all("'3'" not in str(w.message) for w in caught)
    after, moved = averages(optimizer), parameters(model)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("0."), name
        assert after[name].isfinite().all()
    for name in ("3.weight", "3.bias"):
        assert moved[name].isfinite().all(), f"{name} caught its neighbour's disease"
        assert not torch.equal(moved[name], start[name])
    for name in ("0.weight", "0.bias"):
        assert torch.equal(moved[name], start[name])


@pytest.mark.parametrize("kl_clip", [1e-2, None], ids=["kl_clip", "rms clip"])
def test_a_gradient_whose_square_is_no_float32_is_a_number_all_the_same(kl_clip: float | None) -> None:
    poison = Poison(1e25)
    model = nn.Sequential(nn.Linear(6, 5), poison, nn.Tanh(), nn.Linear(5, 4))
    optimizer = stated.KFAC(model, lr=0.1, momentum=0.0, kl_clip=kl_clip, factor_start="unbiased", **EVERY)
    train(model, optimizer, [rows(dtype=torch.float32)])
    start = parameters(model)
    poison.on = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [rows(dtype=torch.float32)])
    moved = parameters(model)
    assert all(value.isfinite().all() for value in moved.values())
    assert optimizer.spectrum("0").output[0] > 1e45, "the curvature of such a gradient, which makes its step as small"
    assert not torch.equal(moved["3.bias"], start["3.bias"]) or kl_clip is not None


def test_a_nan_batch_leaves_all_averages_alone_and_names_every_layer() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.0, **EVERY)
    train(model, optimizer, [rows()])
    before = averages(optimizer)
    x, y = rows()
    x[0, 0] = float("nan")
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="'0', '2', '4'"):
        optimizer.step()
    assert same(averages(optimizer), before)

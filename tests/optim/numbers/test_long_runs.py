"""Overnight runs: long past convergence, with gradients that vanish, nothing breaks and nothing is said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import stated
from optim.numbers.injections import assert_finite


@pytest.fixture(autouse=True)
def _silence_is_required() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Where a direction's own length is what may be beyond all numbers.
OWN: dict[str, Any] = {"graft": None, "momentum": 0.0, "update_clip": 0.07}


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))


def test_a_model_that_has_long_converged_stays_whole() -> None:
    """The run that wrote NaN after 8,600 steps, with statistics at every step so that it needs only 1,250 of them.

    By then the identity has decayed to nothing, gradients are of 1e-10, and squares of reciprocals leave float32.
    """
    torch.manual_seed(0)
    model = small_net()
    x, y = torch.randn(64, 10), torch.randint(2, (64,))
    optimizer = stated.RSKFAC(model, lr=0.1, factor_every=1, inverse_every=5, factor_start="identity", **OWN)
    for _ in range(1400):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert_finite(model, optimizer)
    assert loss < 1e-6


def test_a_regression_converges_with_averages_of_short_memory() -> None:
    torch.manual_seed(0)
    teacher, model = small_net(), small_net()
    x = torch.randn(64, 10)
    y = teacher(x).detach()
    optimizer = stated.RSKFAC(model, lr=0.1, factor_every=1, inverse_every=10, factor_decay=0.5)
    found = []
    for _ in range(250):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert_finite(model, optimizer)
    assert found[-1] < 0.1 * found[0]


@pytest.mark.parametrize("start", ["identity", "unbiased", "paper"])
@pytest.mark.parametrize("decay", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_zero_long_enough_to_be_forgotten_are_survived(
    dtype: torch.dtype, decay: float, start: Any
) -> None:
    """A hinge loss that is met, a saturated softmax: the average decays below every number (2^-20 a step)."""
    model = small_net().to(dtype)
    x, y = torch.randn(8, 10, dtype=dtype), torch.randn(8, 2, dtype=dtype)
    optimizer = stated.RSKFAC(model, factor_every=1, inverse_every=7, factor_decay=decay, factor_start=start)
    for i in range(70):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * (i in (0, 69))).backward()
        optimizer.step()
        if i in (0, 68):
            before = [p.detach().clone() for p in model.parameters()]
    assert_finite(model, optimizer)
    # And when gradients come back, so does learning.
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_dead_layer_stays_where_it_is_and_the_others_train() -> None:
    """The first layer's units are all off: its gradients are zero, and only the start's identity is left of its factor."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    x, y = torch.randn(12, 6), torch.randint(4, (12,))
    optimizer = stated.RSKFAC(model, factor_every=1, inverse_every=10, factor_decay=0.5)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_finite(model, optimizer)
    moved = [not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True)]
    assert moved == [False, False, False, True]  # a weight that only ever sees zeros has no gradient either


@pytest.mark.parametrize("name", ["KFAC", "RSKFAC", "SREKFAC"])
def test_batches_of_one_train(name: str) -> None:
    model = small_net()
    optimizer = getattr(stated, name)(model, factor_every=1, inverse_every=2, rank=4, factor_start="unbiased")
    x, y = torch.randn(16, 10), torch.randint(2, (16,))
    losses = []
    for i in range(160):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[i % 16][None]), y[i % 16][None])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_finite(model, optimizer)
    assert sum(losses[-16:]) < 0.7 * sum(losses[:16])


@pytest.mark.parametrize("damping", [1e-12, 1e12])
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
def test_a_damping_scheduled_to_its_ends_keeps_every_step_within_the_clip(
    rule: Any, relative: bool, damping: float
) -> None:
    model = small_net()
    x, y = torch.randn(64, 10), torch.randint(2, (64,))
    optimizer = stated.RSKFAC(
        model, lr=0.1, damping_rule=rule, relative_to="largest" if relative else None, rank=5, inverse_every=3, **OWN
    )
    for i in range(12):
        if i == 4:
            optimizer.param_groups[0]["damping"] = damping
        start = [p.detach().double() for p in model.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for layer in (0, 2):
            moved = [(p.detach().double() - start.pop(0)).flatten() for p in model[layer].parameters()]
            rms = float(torch.cat(moved).square().mean().sqrt())
            assert rms <= 0.1 * 0.07 * (1 + 1e-4), f"step {i}"
    assert_finite(model, optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_huge_learning_rate_reaches_no_weight_as_inf(momentum: float) -> None:
    """lr times a direction can be beyond float32 although the direction is not: without a clip it is refused."""
    model = small_net()
    x, y = torch.randn(64, 10), torch.randint(2, (64,))
    optimizer = stated.RSKFAC(model, lr=1e30, graft=None, momentum=momentum, update_clip=None, max_failures=10)
    optimizer.zero_grad()
    (1e-9 * F.cross_entropy(model(x), y)).backward()
    with pytest.warns(UserWarning, match="left out"):
        optimizer.step()
    assert_finite(model, optimizer)
    with pytest.raises(ValueError, match="lr"):
        stated.RSKFAC(small_net(), lr=1e39)

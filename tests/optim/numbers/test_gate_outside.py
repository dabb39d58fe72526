"""Numbers that come from outside a direction: learning rates as tensors, decay, old buffers, old gradients."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.numbers.injections import assert_finite
from optim.problems import mlp, parameters, rows, step, train, updates

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1])
def test_a_learning_rate_that_is_a_tensor_is_checked_like_a_number(lr: float) -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, lr=0.1, **EVERY)
    train(model, optimizer, [rows()])
    start = parameters(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(lr)
    with pytest.raises(ValueError, match="lr"):
        train(model, optimizer, [rows()])
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


def test_a_decay_that_makes_weights_grow_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay"):
        stated.RSKFAC(mlp(), lr=0.1, weight_decay=1e38)
    stated.RSKFAC(mlp(), lr=0.1, weight_decay=20.0)


@pytest.mark.parametrize("exclude", [(), ("Linear",)], ids=["preconditioned", "fallback"])
def test_a_buffer_beyond_all_numbers_under_a_later_learning_rate_is_refused(exclude: Any) -> None:
    model = mlp(dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # excluding everything is said to be much
        optimizer = stated.RSKFAC(model, lr=0.1, momentum=0.9, update_clip=1e20, exclude=exclude, **EVERY)
    train(model, optimizer, [rows(dtype=torch.float32)])
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"].fill_(1e15)
    optimizer.param_groups[0]["lr"] = 1e30
    with pytest.warns(UserWarning, match="beyond all numbers"):
        train(model, optimizer, [rows(dtype=torch.float32)])
    assert_finite(model, optimizer)


def test_gradients_from_before_the_optimizer_are_no_reason_to_leave_a_layer_out() -> None:
    model = mlp()
    x, y = rows()
    F.cross_entropy(model(x), y).backward()
    optimizer = stated.RSKFAC(model, **EVERY)
    F.cross_entropy(model(x.flip(0)), y).backward()
    optimizer.step()
    train(model, optimizer, [rows()])
    assert all(record.covered for record in optimizer.report())
    assert updates(optimizer) == {2}


class Branch(nn.Module):
    """A residual branch whose last layer starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.last(torch.relu(self.first(x))))


def test_a_penalty_that_is_all_a_layer_has_at_first_is_no_reason_to_leave_it_out() -> None:
    model = Branch().double()
    optimizer = stated.RSKFAC(model, **EVERY)
    for x, y in (rows() for _ in range(3)):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + 5e-4 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
    assert all(record.covered for record in optimizer.report())


def test_forwards_that_nobody_differentiates_hold_few_graphs_under_drawn_targets() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, fisher="mc", **EVERY)
    alive = []
    for _ in range(80):
        x = rows()[0]
        alive.append(weakref.ref(x))  # a graph keeps the input of its first layer
        model(x)
        del x
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 40
    step(model, optimizer, rows())
    assert updates(optimizer) == {1}

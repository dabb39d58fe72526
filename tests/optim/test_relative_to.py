"""What damping is measured in: a factor's mean eigenvalue, its largest, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_parameters,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    step,
    train,
    twin,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2, "damping": 0.03}
each_rule = pytest.mark.parametrize("rule", ["factored", "product", "pi"])


def smooth() -> nn.Sequential:
    """No gradient is exactly zero here: AdamW without an eps divides by its square root."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4)).double()


def train_scaled(model: nn.Module, optimizer: Any, batches: Any, factor: float) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()


@each_rule
@pytest.mark.parametrize("relative_to", ["mean", "largest"])
@pytest.mark.parametrize("graft", ["sgd", "adamw"])
@pytest.mark.parametrize("factor", [2.0**40, 2.0**-30, 3.7e5, 0.0123])
@pytest.mark.parametrize("sketched", [False, True], ids=["exact", "sketched"])
def test_what_the_loss_is_multiplied_by_does_not_matter(
    rule: str, relative_to: str, graft: Any, factor: float, sketched: bool
) -> None:
    """AdamW's step knows no size, SGD's is undone by its rate: the directions must be the same. Exactly so for 2^k."""
    model = smooth()
    other, start, batches = twin(model), parameters(model), [rows() for _ in range(6)]
    settings: dict[str, Any] = {**EVERY, "graft": graft, "relative_to": relative_to, "damping_rule": rule}
    settings |= {"eps": 0.0} if graft == "adamw" else {"momentum": 0.9, "nesterov": True}
    settings |= {"rank": 3, "oversampling": 1, "tail": "trace"} if sketched else {}
    make = stated.RSKFAC if sketched else stated.KFAC
    train_scaled(model, make(model, lr=0.02, **settings), batches, 1.0)
    rate = 0.02 if graft == "adamw" else 0.02 / factor
    train_scaled(other, make(other, lr=rate, **settings), batches, factor)
    assert_moved(model, start)
    power = factor in (2.0**40, 2.0**-30)
    assert_same_parameters(other, model, exactly=power, rtol=1e-7, atol=1e-9)


def test_an_absolute_damping_does_matter() -> None:
    """Guards the test above."""
    model = smooth()
    other, batches = twin(model), [rows() for _ in range(3)]
    settings: dict[str, Any] = {**EVERY, "graft": "adamw", "eps": 0.0, "lr": 0.02, "relative_to": None}
    train_scaled(model, stated.KFAC(model, **settings), batches, 1.0)
    train_scaled(other, stated.KFAC(other, **settings), batches, 100.0)
    mine, theirs = parameters(model), parameters(other)
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) > 1e-3


def sizes(X: Tensor, relative_to: str | None) -> Tensor:
    """What damping is measured in, a number a group; X is (groups, d, d)."""
    if relative_to is None:
        return torch.ones(len(X), dtype=X.dtype)
    return torch.linalg.eigvalsh(X)[:, -1] if relative_to == "largest" else X.diagonal(dim1=-2, dim2=-1).mean(-1)


@each_rule
@pytest.mark.parametrize("relative_to", ["mean", "largest", None])
@pytest.mark.parametrize("make, draw", [(convnet, images), (reader, sentences)], ids=["images", "text"])
@pytest.mark.parametrize("tail", ["zero", "trace"])
def test_the_damping_in_force_is_the_closed_form(rule: str, relative_to: Any, make: Any, draw: Any, tail: Any) -> None:
    model, damping = make(), 0.03
    optimizer = stated.KFAC(
        model, lr=0.01, damping_rule=rule, relative_to=relative_to, **{**EVERY, "inverse_every": 1}, tail=tail
    )
    train(model, optimizer, [draw() for _ in range(3)])
    factors = {
        name: value if value.ndim == 3 else torch.diag(value)[None] if value.ndim == 1 else value[None]
        for name, value in averages(optimizer).items()
    }
    kinds = set()
    for record in optimizer.report():
        if not record.covered:
            continue
        if f"{record.name}.unit" in factors:
            found = sizes(factors[f"{record.name}.unit"], relative_to)
            size = found.mean() if relative_to == "mean" else found.amax()
            assert record.damping_output == pytest.approx(damping * float(size), rel=1e-9)
            kinds.add("unit")
            continue
        A, G = factors[f"{record.name}.input"], factors[f"{record.name}.output"]
        size_A, size_G = sizes(A, relative_to), sizes(G, relative_to)
        if rule == "factored":
            expected = damping * size_A, damping * size_G
        elif rule == "product":
            expected = damping * size_A * size_G, torch.ones_like(size_G)
        else:
            pi = (sizes(A, "mean") / sizes(G, "mean")).sqrt()
            root = (damping * size_A * size_G).sqrt()
            expected = pi * root, root / pi
        assert record.damping_input == pytest.approx(float(expected[0].mean()), rel=1e-9)
        assert record.damping_output == pytest.approx(float(expected[1].mean()), rel=1e-9)
        kinds.add("Kronecker")
    assert kinds == {"unit", "Kronecker"}


@pytest.mark.parametrize("tail", ["zero", "trace"])
def test_the_mean_is_that_of_the_average_whatever_a_sketch_keeps_of_it(tail: Any) -> None:
    model = mlp()
    optimizer = stated.RSKFAC(
        model, relative_to="mean", rank=2, oversampling=1, tail=tail, **{**EVERY, "inverse_every": 1}
    )
    train(model, optimizer, [rows() for _ in range(3)])
    for record in optimizer.report():
        A = averages(optimizer)[f"{record.name}.input"]
        assert record.damping_input == pytest.approx(0.03 * float(A.trace()) / len(A), rel=1e-9)


@each_rule
@pytest.mark.parametrize("graft", ["sgd", "adamw", None])
@pytest.mark.parametrize("relative_to", ["mean", "largest"])
@pytest.mark.parametrize("sketched", [False, True], ids=["exact", "sketched"])
def test_a_dead_layer_stands_still_and_wakes_up(rule: str, graft: Any, relative_to: Any, sketched: bool) -> None:
    """A factor of zero has no size: nothing is divided by it, and nothing stays of it."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        model[0].bias.fill_(
            -100
        )  # no unit fires: the first layer has no gradients, the second no inputs but its bias's
    settings: dict[str, Any] = {**EVERY, "graft": graft, "relative_to": relative_to, "damping_rule": rule}
    settings |= {"rank": 2, "oversampling": 1} if sketched else {}
    optimizer = (stated.RSKFAC if sketched else stated.KFAC)(model, lr=0.01, **settings)
    start = parameters(model)
    train(model, optimizer, [rows() for _ in range(3)])
    after = parameters(model)
    assert all(value.isfinite().all() for value in after.values())
    stayed = {name for name, value in after.items() if torch.equal(value, start[name])}
    assert stayed == {"0.weight", "0.bias", "2.weight"}
    with torch.no_grad():
        model[0].bias.fill_(0.1)
    before = parameters(model)
    step(model, optimizer, rows())
    step(model, optimizer, rows())
    assert_moved(model, before)
    assert all(value.isfinite().all() for value in parameters(model).values())

"""Small layers take their steps in a few calls for all of them: the same steps as one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_parameters,
    convnet,
    images,
    mlp,
    parameters,
    rows,
    same,
    step,
    train,
    twin,
)
from rkfac.optim import moves, planning

RUN: dict[str, Any] = {
    "relative_to": "mean",
    "damping": 1.0,
    "rank": "auto",
    "tail": "trace",
    "factor_every": 2,
    "inverse_every": 3,
}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.01, "graft": "adamw"}


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter counts as large."""
    monkeypatch.setattr(planning, "SMALL", 0)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers took each step that was taken together."""
    counts: list[int] = []
    genuine = moves.PreconditionedTogether.apply

    def apply(self: moves.PreconditionedTogether, *args: Any) -> None:
        counts.append(len(self.moves))
        genuine(self, *args)

    monkeypatch.setattr(moves.PreconditionedTogether, "apply", apply)
    return counts


@pytest.mark.parametrize(
    "rule",
    [
        SGD,
        {**SGD, "nesterov": True},
        {**SGD, "weight_decay": 0.1},
        {**SGD, "weight_decay": 0.1, "nesterov": True, "weight_decay_from": 3},
        {**SGD, "maximize": True},
        {**SGD, "update_clip": 0.01},
        ADAMW,
        {**ADAMW, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["rows", "images", "channels last"])
def test_the_steps_are_the_same(rule: dict[str, Any], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = (mlp(), rows) if case == "rows" else (convnet(), images)
    if case == "channels last":
        model = model.to(memory_format=torch.channels_last)
    other, batches, begin = twin(model), [draw() for _ in range(8)], parameters(model)
    with monkeypatch.context() as patch:
        counts = noted(patch)
        train(model, stated.RSKFAC(model, **{**RUN, **rule}), batches)
    assert len(counts) == 8
    assert max(counts) >= 3
    apart(monkeypatch)
    counts = noted(monkeypatch)
    train(other, stated.RSKFAC(other, **{**RUN, **rule}), batches)
    assert not counts
    assert_same_parameters(model, other, rtol=1e-10, atol=1e-12)
    assert_moved(model, begin)


@pytest.mark.parametrize("rule", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_groups_frozen_parameters_and_late_ones(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight and a bias of two groups, a layer that starts later than the others, a bias that no group holds."""

    def run(model: nn.Sequential, batches: list[Any]) -> None:
        groups = [
            {"params": [model[0].weight, model[2].weight, model[2].bias], "lr": 2 * rule["lr"], "weight_decay": 0.1},
            {"params": [model[0].bias, model[4].weight]},
        ]
        optimizer = stated.RSKFAC(model, params=groups, **{**RUN, **rule})
        model[2].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        train(model, optimizer, batches[:4])
        model[2].weight.requires_grad_(True)
        model[2].bias.requires_grad_(True)
        train(model, optimizer, batches[4:])

    model = mlp()
    other, batches = twin(model), [rows() for _ in range(9)]
    run(model, batches)
    apart(monkeypatch)
    run(other, batches)
    assert_same_parameters(model, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("scale", [1e-18, 1e12])
def test_the_steps_are_the_same_at_every_scale(
    rule: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loss, in float32."""
    rule = {**rule, "eps": 1e-30} if rule is ADAMW else {**rule, "lr": rule["lr"] / scale}

    def run(model: nn.Module) -> rkfac.RSKFAC:
        optimizer = stated.RSKFAC(model, **{**RUN, **rule})
        for x, y in batches:
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
        return optimizer

    model, batches = mlp(dtype=torch.float32), [rows(dtype=torch.float32) for _ in range(6)]
    other, begin = twin(model), parameters(model)
    run(model)
    apart(monkeypatch)
    run(other)
    assert_same_parameters(model, other, rtol=1e-4, atol=1e-5)
    assert_moved(model, begin)


def test_seconds_are_counted_for_every_layer() -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, **RUN, **SGD)
    step(model, optimizer, rows())
    before = [layer.seconds["apply"] for layer in optimizer.report()]
    step(model, optimizer, rows())
    assert all(layer.seconds["apply"] > was for layer, was in zip(optimizer.report(), before, strict=True))


@pytest.mark.parametrize("rule", [SGD, {**SGD, "weight_decay": 0.1}, ADAMW], ids=str)
def test_a_layer_whose_gradient_is_not_finite_is_left_out_and_the_others_go_on(rule: dict[str, Any]) -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, **{**RUN, **rule})
    train(model, optimizer, [rows() for _ in range(3)])
    x, y = rows()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = float("nan")
    begin = parameters(model)
    with pytest.warns(UserWarning, match="'2'"):
        optimizer.step()
    now = parameters(model)
    assert all(bool(torch.isfinite(p).all()) for p in now.values())
    moved = {name for name, p in now.items() if not torch.equal(p, begin[name])}
    assert moved >= {"0.weight", "0.bias", "4.weight", "4.bias"}
    if not rule.get("weight_decay"):
        assert "2.weight" not in moved or rule is ADAMW
    assert same(parameters(model), now)

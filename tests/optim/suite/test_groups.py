from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import rkfac
from optim.enrolled import Enrolled
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    speaker,
    step,
    train,
    twin,
)
from rkfac.schedules import Scheduler, Steps

Build = Callable[..., rkfac.KFAC]
EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2}


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights, biases."""
    named = list(model.named_parameters())
    return [p for n, p in named if n.endswith("weight")], [p for n, p in named if n.endswith("bias")]


def test_groups_with_the_same_settings_equal_one_group(build: Build) -> None:
    model = mlp()
    split, batches = twin(model), [rows() for _ in range(4)]
    optimizer = build(model, lr=0.05, momentum=0.9, **EVERY)
    weights, biases = halves(split)
    grouped = build(split, lr=0.05, momentum=0.9, params=[{"params": weights}, {"params": biases}], **EVERY)
    train(model, optimizer, batches)
    train(split, grouped, batches)
    assert_same_parameters(split, model)


def test_each_parameter_moves_by_its_own_groups_rate_and_decay(build: Enrolled) -> None:
    """Without a KL clip the direction does not depend on the rates, so both steps can be had from one reference."""
    if "free direction" in build.lacks:
        pytest.skip("its direction depends on the rate")
    model, batch = mlp(), rows()
    settings = {**EVERY, "kl_clip": None, "momentum": 0.0, "weight_decay_from": 0}
    start = parameters(model)
    reference = twin(model)
    train(reference, build(reference, lr=1.0, weight_decay=0.0, **settings), [batch])
    direction = {name: start[name] - value for name, value in parameters(reference).items()}
    weights, biases = halves(model)
    groups = [{"params": biases, "lr": 0.5, "weight_decay": 0.0}, {"params": weights, "lr": 0.01, "weight_decay": 0.3}]
    train(model, build(model, params=groups, **settings), [batch])
    for name, value in parameters(model).items():
        lr, decay = (0.5, 0.0) if name.endswith("bias") else (0.01, 0.3)
        torch.testing.assert_close(value, (1 - lr * decay) * start[name] - lr * direction[name], rtol=1e-9, atol=1e-12)


def test_a_group_with_rate_zero_stays_put(build: Build) -> None:
    model = mlp()
    start = parameters(model)
    weights, biases = halves(model)
    groups = [{"params": weights}, {"params": biases, "lr": 0.0}]
    optimizer = build(model, lr=0.05, params=groups, weight_decay=0.1, weight_decay_from=0, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    for name, value in parameters(model).items():
        assert torch.equal(value, start[name]) == name.endswith("bias"), name


def test_parameters_left_out_stay_put_and_are_reported(build: Build) -> None:
    model = mlp()
    start = parameters(model)
    optimizer = build(model, params=model[2].parameters(), **EVERY)
    train(model, optimizer, [rows() for _ in range(2)])
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, start[name])}
    assert moved == {"2.weight", "2.bias"}
    reasons = {r.name: r.reason for r in optimizer.report() if not r.covered}
    assert reasons.keys() == {"0", "4"}
    assert all("not among the optimizer's parameters" in reason for reason in reasons.values())


def test_added_layers_are_preconditioned_from_then_on(build: Build) -> None:
    """Adding a group later must end where giving it at the start does."""
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(3)]
    late = build(model, lr=0.05, params=model[4].parameters(), **EVERY)
    late.add_param_group({"params": [*model[0].parameters(), *model[2].parameters()], "lr": 0.02})
    groups = [
        {"params": list(other[4].parameters())},
        {"params": [*other[0].parameters(), *other[2].parameters()], "lr": 0.02},
    ]
    early = build(other, lr=0.05, params=groups, **EVERY)
    assert {r.name for r in late.report() if r.covered} == {"0", "2", "4"}
    start = parameters(model)
    train(model, late, batches)
    train(other, early, batches)
    assert_moved(model, start)
    assert_same_parameters(model, other)


def test_an_added_parameter_of_no_layer_trains_by_the_fallback_rule(build: Build) -> None:
    model = mlp()
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = build(model, lr=0.05, momentum=0.0, fallback="sgd", **EVERY)
    optimizer.add_param_group({"params": [temperature], "lr": 0.25, "weight_decay": 0.0})
    x, y = rows()
    F.cross_entropy(model(x) * temperature, y).backward()
    gradient = temperature.grad.clone()
    optimizer.step()
    torch.testing.assert_close(temperature.detach(), 1 - 0.25 * gradient)


def test_added_groups_are_checked_and_refused_whole(build: Build) -> None:
    model = mlp()
    optimizer = build(model)
    extra = nn.Parameter(torch.zeros(2))
    for bad in ({"lr": -1.0}, {"damping": 0.0}, {"rank": 0}, {"factor_every": 0}):
        (name,) = bad
        with pytest.raises(ValueError, match=name):
            optimizer.add_param_group({"params": [extra], **bad})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, 1, gamma=0.5),
        lambda o: CosineAnnealingLR(o, 5),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=6),  # also turns the momentum, or the first beta
    ],
    ids=["StepLR", "CosineAnnealingLR", "OneCycleLR"],
)
def test_torch_schedulers_act_as_values_set_by_hand(build: Build, schedule: Callable[[Any], Any]) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(5)]
    optimizer, manual = (build(m, lr=0.08, momentum=0.9, **EVERY) for m in (model, other))
    scheduler = schedule(optimizer)
    for batch in batches:
        turned = optimizer.param_groups[0]
        manual.param_groups[0].update({key: turned[key] for key in ("lr", "momentum", "betas") if key in turned})
        step(model, optimizer, batch)
        step(other, manual, batch)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] != 0.08
    assert_same_parameters(model, other, exactly=True)


def test_every_scheduled_setting_takes_effect_at_its_epoch(build: Enrolled) -> None:
    """A run under schedules equals one whose groups are set by hand between the epochs."""
    later: dict[str, Any] = {
        "lr": 0.03,
        "momentum": 0.5,
        "weight_decay": 0.01,
        "damping": 0.02,
        "factor_decay": 0.7,
        "factor_every": 1,
        "inverse_every": 1,
        "rank": 5,
        "oversampling": 2,
        "power_iterations": 2,
        "update_clip": 0.05,
        "kl_clip": 1e-3,
    }
    first = {**later, "lr": 0.08, "momentum": 0.9, "damping": 0.1, "factor_decay": 0.9, "factor_every": 3, "rank": 3}
    first |= {"weight_decay": 0.0, "inverse_every": 3, "oversampling": 1, "update_clip": None, "kl_clip": 1e-2}
    first |= {"power_iterations": 1}
    if "momentum" in build.lacks:
        first["betas"], later["betas"] = (first.pop("momentum"), 0.99), (later.pop("momentum"), 0.9)
    first, later = ({k: v for k, v in settings.items() if k not in build.lacks} for settings in (first, later))
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(6)]
    optimizer = build(model)
    scheduler = Scheduler(optimizer, **{name: Steps({1: first[name], 2: later[name]}) for name in later})
    manual = build(other, **first)
    for epoch in range(2):
        train(model, optimizer, batches[3 * epoch : 3 * epoch + 3])
        train(other, manual, batches[3 * epoch : 3 * epoch + 3])
        scheduler.step()
        manual.param_groups[0].update(later)
    assert_same_parameters(model, other, exactly=True)
    assert_same_averages(optimizer, manual, exactly=True)


def test_a_scheduled_value_that_makes_no_sense_is_refused_by_name(build: Build) -> None:
    model = mlp()
    optimizer = build(model)
    start = parameters(model)
    optimizer.param_groups[0]["damping"] = 0.0
    with pytest.raises(ValueError, match="damping"):
        train(model, optimizer, [rows()])
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_zeroing_gradients(build: Build, set_to_none: bool) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(4)]
    optimizer, plain = build(model, **EVERY), build(other, **EVERY)
    for x, y in batches:
        optimizer.zero_grad(set_to_none)
        assert all(
            (p.grad is None) == set_to_none or not p.grad.any() for p in model.parameters() if p.grad is not None
        )
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        other.zero_grad()  # the model's own, which the optimizer never hears of
        F.cross_entropy(other(x), y).backward()
        plain.step()
    assert_same_parameters(model, other, exactly=True)


def test_dropped_gradients_take_their_statistics_along(build: Build) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(3)]
    optimizer, plain = build(model, **EVERY), build(other, **EVERY)
    for x, y in batches:
        F.cross_entropy(100 * model(x.flip(0)), y).backward()  # thought better of
        step(model, optimizer, (x, y))
        step(other, plain, (x, y))
    assert_same_averages(optimizer, plain, exactly=True)
    assert_same_parameters(model, other, exactly=True)


def test_a_closure_equals_the_unrolled_step(build: Build) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(4)]
    optimizer, plain = build(model, **EVERY), build(other, **EVERY)
    for x, y in batches:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == step(other, plain, (x, y))
    assert_same_parameters(model, other, exactly=True)


@pytest.mark.parametrize("case", ["images", "text", "speech"])
def test_maximising_equals_minimising_the_negated_loss(build: Build, case: str) -> None:
    make, draw = {"images": (convnet, images), "text": (reader, sentences), "speech": (speaker, sentences)}[case]
    model = make()
    other = twin(model)
    settings = {**EVERY, "momentum": 0.9, "weight_decay": 0.01, "weight_decay_from": 0}
    up, down = build(model, maximize=True, **settings), build(other, **settings)
    start = parameters(model)
    for x, y in (draw() for _ in range(3)):
        for m, o, sign in ((model, up, 1.0), (other, down, -1.0)):
            o.zero_grad()
            (sign * -F.cross_entropy(m(x), y)).backward()
            o.step()
    assert_moved(model, start)
    assert_same_parameters(model, other)
    assert_same_averages(up, down)

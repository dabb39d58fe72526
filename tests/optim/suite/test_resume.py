from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim.enrolled import Enrolled
from optim.problems import (
    assert_same_averages,
    assert_same_parameters,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    same,
    sentences,
    speaker,
    step,
    train,
    twin,
    updates,
)
from rkfac.schedules import Scheduler, Steps

Build = Callable[..., rkfac.KFAC]


def saved(*states: Any) -> Any:
    """Through a file, as a careful user loads it."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
@pytest.mark.parametrize("case", ["images", "text", "speech"])
def test_resuming_between_statistics_and_refresh_is_bit_exact(
    build: Build, fisher: str, fallback: str, case: str
) -> None:
    make, draw = {"images": (convnet, images), "text": (reader, sentences), "speech": (speaker, sentences)}[case]
    batches = [draw() for _ in range(9)]
    settings = {"momentum": 0.9, "factor_every": 2, "inverse_every": 3, "fisher": fisher, "fallback": fallback}
    model = make(dtype=torch.float32)
    if case == "images":
        batches = [(x.float(), y) for x, y in batches]
    optimizer = build(model, lr=0.05, **settings)
    # After 5 steps: statistics at 0, 2, 4, bases of step 3; steps 5 and 6 use the old basis, then a new one.
    train(model, optimizer, batches[:5])
    model_state, optimizer_state = saved(model.state_dict(), optimizer.state_dict())

    torch.manual_seed(99)
    fresh = make(dtype=torch.float32)
    fresh.load_state_dict(model_state)
    resumed = build(fresh, lr=0.9, **{**settings, "momentum": 0.1, "seed": 5})
    resumed.load_state_dict(optimizer_state)
    assert same(resumed.state_dict(), optimizer.state_dict())
    for batch in batches[5:]:
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
        assert_same_parameters(fresh, model, exactly=True)
    assert_same_averages(resumed, optimizer, exactly=True)
    assert same(resumed.state_dict(), optimizer.state_dict())


def test_resuming_keeps_a_period_that_a_schedule_just_changed(build: Enrolled) -> None:
    """The step after the change must be the same step whether or not the run was interrupted there."""
    batches = [rows() for _ in range(6)]
    model = mlp()
    optimizer = build(model, lr=0.05, factor_every=4, inverse_every=4)
    schedule = Scheduler(optimizer, **{build.period: Steps({1: 4, 2: 1})})
    train(model, optimizer, batches[:2])
    schedule.step()
    model_state, optimizer_state = saved(model.state_dict(), optimizer.state_dict())
    fresh = mlp()
    fresh.load_state_dict(model_state)
    resumed = build(fresh)
    resumed.load_state_dict(optimizer_state)
    train(fresh, resumed, batches[2:])
    train(model, optimizer, batches[2:])
    assert same(resumed.state_dict(), optimizer.state_dict())
    if "fixed periods" not in build.lacks:
        assert updates(optimizer) == {5}  # step 0, then each of the four steps that follow the change


def test_the_report_survives_a_resume(build: Build) -> None:
    model = mlp()
    optimizer = build(model, factor_every=1, inverse_every=2)
    train(model, optimizer, [rows() for _ in range(3)])
    (state,) = saved(optimizer.state_dict())
    resumed = build(twin(model))
    resumed.load_state_dict(state)
    for mine, theirs in zip(resumed.report(), optimizer.report(), strict=True):
        for field in ("rank_input", "rank_output", "damping_input", "damping_output"):
            assert getattr(mine, field) == getattr(theirs, field), field


def _without_curvature(state: dict[str, Any]) -> None:
    del state["curvature"]


def _without_a_layer(state: dict[str, Any]) -> None:
    del state["curvature"]["blocks"]["2"]


def _with_a_strange_layer(state: dict[str, Any]) -> None:
    state["curvature"]["blocks"]["other"] = state["curvature"]["blocks"]["2"]


def _without_the_step(state: dict[str, Any]) -> None:
    del state["curvature"]["step"]


def _without_the_seed(state: dict[str, Any]) -> None:
    del state["curvature"]["randomness"]["seed"]


def _with_a_generator(state: dict[str, Any]) -> None:
    state["curvature"]["randomness"] = {"generator": torch.Generator().get_state()}


def _known(block: dict[str, Any], side: str) -> tuple[dict[str, Any], str]:
    """Where a saved block holds what it has seen: a factor's average, or the samples' gradients themselves."""
    if block["factors"]:
        return block["factors"][side], "value"
    return block["basis"]["rows"], "G" if side == "output" else "X"


def _with_a_wider_last_factor(state: dict[str, Any]) -> None:
    holder, key = _known(state["curvature"]["blocks"]["4"], "output")
    holder[key] = torch.eye(5, dtype=torch.float64)


def _with_another_bias(state: dict[str, Any]) -> None:
    state["curvature"]["blocks"]["4"]["bias"] = False


def _with_another_format(state: dict[str, Any]) -> None:
    state["curvature"]["format"] = -1


def _with_fewer_parameters(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _with_two_groups(state: dict[str, Any]) -> None:
    state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))


def _with_a_wrong_momentum_buffer(state: dict[str, Any]) -> None:
    state["state"][0]["momentum_buffer"] = torch.zeros(3, 2, dtype=torch.float64)


MISFITS = [
    _without_curvature,
    _without_a_layer,
    _with_a_strange_layer,
    _without_the_step,
    _without_the_seed,
    _with_a_generator,
    _with_a_wider_last_factor,
    _with_another_bias,
    _with_another_format,
    _with_fewer_parameters,
    _with_two_groups,
    _with_a_wrong_momentum_buffer,
]


@pytest.mark.parametrize("spoil", MISFITS, ids=lambda f: f.__name__.strip("_"))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(build: Build, spoil: Callable[[Any], None]) -> None:
    batches = [rows() for _ in range(5)]
    model = mlp()
    optimizer = build(model, momentum=0.9, factor_every=1, inverse_every=2)
    train(model, optimizer, batches[:3])
    undisturbed = twin(model)
    twin_optimizer = build(undisturbed)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    other = copy.deepcopy(optimizer.state_dict())
    for block in other["curvature"]["blocks"].values():
        holder, key = _known(block, "input")
        holder[key] *= 2
    other["param_groups"][0]["lr"] = 7.0
    spoil(other)

    # Refused in the worst place: statistics and gradients of the coming step are already there.
    for m, o in ((model, optimizer), (undisturbed, twin_optimizer)):
        o.zero_grad()
        nn.functional.cross_entropy(m(batches[3][0]), batches[3][1]).backward()
    before, report = copy.deepcopy(optimizer.state_dict()), [r.captured_input for r in optimizer.report()]
    with pytest.raises(ValueError):
        optimizer.load_state_dict(other)
    assert same(optimizer.state_dict(), before)
    assert [r.captured_input for r in optimizer.report()] == report
    for m, o in ((model, optimizer), (undisturbed, twin_optimizer)):
        o.step()
        step(m, o, batches[4])
    assert_same_parameters(model, undisturbed, exactly=True)
    assert_same_averages(optimizer, twin_optimizer, exactly=True)


def test_the_state_of_another_optimizer_is_refused_by_name(build: Build) -> None:
    model = mlp()
    with pytest.raises(ValueError, match="rkfac"):
        build(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_a_loaded_state_is_not_shared_with_its_source(build: Build) -> None:
    model = mlp()
    optimizer = build(model, momentum=0.0, factor_every=1, inverse_every=1)
    train(model, optimizer, [rows()])
    other = twin(model)
    follower = build(other)
    state = optimizer.state_dict()
    # torch itself shares its own buffers with the dictionary.
    follower.load_state_dict({**state, "state": copy.deepcopy(state["state"])})
    before, start = copy.deepcopy(follower.state_dict()), parameters(other)
    train(model, optimizer, [rows() for _ in range(2)])
    assert same(follower.state_dict(), before)
    assert all(torch.equal(start[name], value) for name, value in parameters(other).items())

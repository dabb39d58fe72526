"""What is not finite reaches no parameter, buffer or average, whatever produced it, and the layer is named."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from optim.enrolled import Enrolled
from optim.numbers.injections import SOLVERS, STATISTICS, TARGET, UPDATES, assert_finite, injected
from optim.problems import assert_moved, parameters, reader, same, sentences, step, twin

Build = Callable[..., rkfac.KFAC]
EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "update_clip": 0.07}
MODES: list[dict[str, Any]] = [{"momentum": 0.0, "fallback": "sgd"}, {"momentum": 0.9, "fallback": "adamw"}]


def pair(build: Build, mode: dict[str, Any]) -> tuple[nn.Module, rkfac.KFAC, nn.Module, rkfac.KFAC]:
    """Twice the same model after one healthy step."""
    model = reader(torch.float32)
    other = twin(model)
    optimizer, healthy = (build(m, lr=0.1, **EVERY, **mode) for m in (model, other))
    batch = sentences()
    step(model, optimizer, batch)
    step(other, healthy, batch)
    return model, optimizer, other, healthy


def said_in(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]


def assert_others_as(build: Enrolled, model: nn.Module, other: nn.Module, *but: str) -> None:
    if "layers apart" in build.lacks:
        return  # a layer's step depends on where the others' have led
    mine, theirs = parameters(model), parameters(other)
    for name in mine:
        if not name.startswith(but):
            assert torch.equal(mine[name], theirs[name]), f"{name} caught its neighbour's disease"


@pytest.mark.parametrize("stage", [*STATISTICS, *UPDATES])
def test_the_layer_is_named_and_all_others_move_as_if_nothing_had_happened(build: Enrolled, stage: str) -> None:
    if stage in build.lacks:
        pytest.skip(f"it has no {stage}")
    for mode in MODES:
        model, optimizer, other, healthy = pair(build, mode)
        batch, start = sentences(), parameters(model)
        with injected({**STATISTICS, **UPDATES}[stage], optimizer):
            said = said_in(lambda: step(model, optimizer, batch))  # noqa: B023
        step(other, healthy, batch)
        assert_finite(model, optimizer)
        assert_others_as(build, model, other, TARGET)
        assert any(repr(TARGET) in text for text in said), said
        if stage in UPDATES and not mode["momentum"]:
            # Nothing of a refused update is left, not even its finite entries.
            for name in (f"{TARGET}.weight", f"{TARGET}.bias"):
                assert torch.equal(parameters(model)[name], start[name])
        assert said_in(lambda: step(model, optimizer, batch)) == []  # noqa: B023
        assert_finite(model, optimizer)


@pytest.mark.parametrize("stage", SOLVERS)
def test_a_solver_that_answers_nan_costs_one_layer_its_new_basis_and_nothing_else(build: Enrolled, stage: str) -> None:
    for mode in MODES:
        model, optimizer, other, healthy = pair(build, mode)
        batch = sentences()
        old = copy.deepcopy(optimizer.state_dict()["curvature"]["blocks"][TARGET])
        with injected(SOLVERS[stage], optimizer):
            said = said_in(lambda: step(model, optimizer, batch))  # noqa: B023
        step(other, healthy, batch)
        assert_finite(model, optimizer)
        assert_others_as(build, model, other, TARGET)
        block = optimizer.state_dict()["curvature"]["blocks"][TARGET]
        if stage == "every solver" or block["failures"]:  # every decomposition needs one of them
            assert any(repr(TARGET) in text and "previous basis" in text for text in said), said
            for side, factor in block["factors"].items():
                assert same(factor["basis"], old["factors"][side]["basis"])
            assert same(block.get("basis"), old.get("basis"))
        else:
            assert said == []
            assert block["version"] == old["version"] + 1


def spoil_gradient(model: nn.Module, name: str, value: float) -> None:
    gradient = dict(model.named_parameters())[name].grad
    assert gradient is not None
    gradient.view(-1)[0] = value


@pytest.mark.parametrize("value", [-math.inf, 1e38])
@pytest.mark.parametrize("name", ["scale", "norm.bias", "embedding.weight"])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named(build: Enrolled, name: str, value: float) -> None:
    """Of a parameter that no block covers, and of one of each kind of block."""
    for mode in MODES:
        model, optimizer, other, healthy = pair(build, mode)
        batch = sentences()
        for m, o in ((model, optimizer), (other, healthy)):
            o.zero_grad()
            F.cross_entropy(m(batch[0]), batch[1]).backward()
        spoil_gradient(model, name, value)
        said = said_in(optimizer.step)
        healthy.step()
        assert_finite(model, optimizer)
        layer = name.split(".")[0]
        assert_others_as(build, model, other, layer)
        if not math.isfinite(value) or name == "scale":  # a layer's clip brings 1e38 down to size
            assert any(f"'{layer}'" in text or f"'{name}'" in text for text in said), said


def test_a_buffer_that_is_not_finite_does_not_reach_its_weight(build: Enrolled) -> None:
    model, optimizer, other, healthy = pair(build, MODES[1])
    buffers = optimizer.state[model.hidden.weight]
    buffers["exp_avg" if "exp_avg" in buffers else "momentum_buffer"][0, 0] = math.nan
    batch = sentences()
    said = said_in(lambda: step(model, optimizer, batch))
    step(other, healthy, batch)
    assert_finite(model, optimizer)
    assert_others_as(build, model, other, TARGET)
    assert any(repr(TARGET) in text for text in said), said


@pytest.mark.parametrize("stage", ["every solver", "direction nan", "clip nan"])
def test_failures_in_a_row_are_an_error_that_loses_nothing(build: Build, stage: str) -> None:
    for mode in MODES:
        model, optimizer, _, _ = pair(build, {**mode, "max_failures": 3})
        with injected({**SOLVERS, **UPDATES}[stage], optimizer):
            for _ in range(2):
                assert any(repr(TARGET) in text for text in said_in(lambda: step(model, optimizer, sentences())))  # noqa: B023
            weights, state = parameters(model), copy.deepcopy(optimizer.state_dict())
            batch = sentences()
            with pytest.raises(RuntimeError, match=rf"'{TARGET}'.*3 times in a row"):
                step(model, optimizer, batch)
        assert same(parameters(model), weights), "the model was half stepped"
        after = optimizer.state_dict()
        assert same(after["state"], state["state"]), "buffers moved in a step that was an error"
        assert after["curvature"]["step"] == state["curvature"]["step"]
        assert_finite(model, optimizer)
        # What the message promises: save now, go on later.
        file = io.BytesIO()
        torch.save((model.state_dict(), after), file)
        file.seek(0)
        model_state, optimizer_state = torch.load(file, weights_only=True)
        fresh = reader(torch.float32)
        fresh.load_state_dict(model_state)
        resumed = build(fresh, lr=0.1, **EVERY, **mode, max_failures=3)
        resumed.load_state_dict(optimizer_state)
        start, batch = parameters(model), sentences()
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
        assert_moved(model, start)
        assert same(parameters(fresh), parameters(model))
        assert_finite(model, optimizer)

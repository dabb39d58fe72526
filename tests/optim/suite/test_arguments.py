"""What the optimizers refuse. They share one constructor, so that one of them stands for all where values are tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim.problems import mlp, parameters, rows, same, step, twin

Build = Callable[..., rkfac.KFAC]
NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[Any]] = {
    "lr": [-0.1, NAN, INF, "0.1", True],
    "graft": ["adam", "SGD", True, 3],
    "momentum": [-0.1, 1.0, NAN, "x"],
    "nesterov": [None, 1, "yes"],
    "betas": [0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), "ab"],
    "eps": [-1e-8, NAN, INF, "x"],
    "weight_decay": [-1e-3, NAN, INF],
    "weight_decay_from": [-1, 1.5, None],
    "damping": [0.0, -1.0, NAN, INF, None, "auto"],
    "damping_rule": ["tikhonov", None, 3],
    "power": [0.0, -1.5, 1, "half", None, True, float("nan")],
    "sides": ["left", None, True],
    "relative_to": ["yes", 2, True],
    "factor_decay": [1.0, -0.1, NAN, None],
    "factor_every": [0, -1, 2.5, True, None],
    "inverse_every": [0, -1, 2.5, True, None],
    "factor_start": ["zero", None],
    "eager_start": [None, 1, "yes"],
    "apply": [None, "forward", True],
    "stagger": [None, 1, "yes"],
    "stale": [0.0, -0.1, NAN, INF, "x", True],
    "rank": [0, -1, 2.5, True, "all", None],
    "oversampling": [-1, 1.5, True, None],
    "power_iterations": [-1, 1.5, True, None],
    "tail": ["flat", None],
    "warm_start": [None, "yes", 2],
    "update_clip": [0.0, -1.0, NAN, INF, "x"],
    "kl_clip": [0.0, -1.0, NAN, INF, "x"],
    "fisher": ["true", None],
    "likelihood": ["poisson", None, 3],
    "weight_sharing": ["both", None],
    "rows": [0, -1, 2.5, True, "all"],
    "loss_average": ["mean", None],
    "fallback": ["adam", 3],
    "fallback_scale": [-1.0, NAN, None],
    "include": [3, (3,), None],
    "exclude": [3, (3,), None],
    "max_factor_dim": [0, 2.5, True, None],
    "decomposition": ["rsvd", rkfac.RSVD, 3],
    "adaptive_damping": [True, "lm", rkfac.LevenbergMarquardt],
    "grad_scaler": [True, 1024.0, "scaler"],
    "process_group": ["gloo", 0, True],
    "memory": ["shared", None, True],
    "max_failures": [0, 2.5, True, None],
    "maximize": [1, None, "yes"],
    "generator": [3, "x"],
    "seed": [None, 1.5, "x", True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=name):
        rkfac.RSKFAC(model, **{name: value})
    assert not model._forward_hooks, "a refused optimizer left hooks behind"


@pytest.mark.parametrize("kind", [rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC])
def test_every_signature_is_written_out_and_every_keyword_has_its_bad_values(kind: type) -> None:
    assert inspect.signature(kind).parameters.keys() - {"model", "params"} == BAD.keys()


@pytest.mark.parametrize(
    "model, error", [(None, TypeError), (3, ValueError), ([nn.Parameter(torch.zeros(2))], ValueError)]
)
def test_the_first_argument_is_a_model(build: Build, model: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="model"):
        build(model)


def test_parameters_in_place_of_the_model_find_it(build: Build) -> None:
    """The steps of both ways are those of the model in its own place."""
    model = mlp()
    ways = {"model": lambda m: m, "iterator": lambda m: m.parameters(), "list": lambda m: list(m.parameters())}
    ended = []
    for way in ways.values():
        copy = twin(model)
        optimizer = build(way(copy), factor_every=1, inverse_every=1)
        torch.manual_seed(1)
        for _ in range(2):
            step(copy, optimizer, rows())
        assert all(layer.covered for layer in optimizer.report())
        ended.append(parameters(copy))
    assert same(ended[1], ended[0])
    assert same(ended[2], ended[0])


def test_parameters_in_two_places_are_refused(build: Build) -> None:
    model = mlp()
    with pytest.raises(ValueError, match="params= is given"):
        build(model.parameters(), params=model.parameters())


def test_an_unknown_keyword_is_a_type_error(build: Build) -> None:
    with pytest.raises(TypeError, match="dampening"):
        build(mlp(), dampening=0.1)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"rank": 0}, {"kl_clip": 0.0}, {"maximize": 3}])
def test_a_bad_value_in_a_group_is_refused_by_name(build: Build, bad: dict[str, Any]) -> None:
    model = mlp()
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        build(model, params=[{"params": model.parameters(), **bad}])


def test_groups_that_disagree_on_the_kl_clip_are_refused(build: Build) -> None:
    """It is one bound over all layers: two values cannot both hold."""
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "kl_clip": 0.5}]
    with pytest.raises(ValueError, match="kl_clip"):
        build(model, params=groups).step()

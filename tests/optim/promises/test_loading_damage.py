"""Loading is all or nothing: every entry of a saved state is damaged in turn, and nothing may change."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import assert_same_parameters, mlp, reader, rows, same, sentences, step, train, twin

TOGETHER = ("exp_avg", "exp_avg_sq", "adam_step", "momentum_buffer", "decay_share")
SETTINGS: dict[str, Any] = {"momentum": 0.9, "rank": 2, "oversampling": 1, "factor_every": 2, "inverse_every": 2}


def entries(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nested state, leaves and branches."""
    items: Any = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from entries(value, (*path, key))


def damages(value: Any) -> Iterator[tuple[str, Any]]:
    """Ways in which one entry can be wrong."""
    yield "deleted", KeyError
    yield "text", "not this"
    yield "object", object()
    if isinstance(value, Tensor) and value.is_floating_point():
        yield "nan", torch.full_like(value, math.nan)
        yield "wider", torch.zeros(*value.shape, 2)
        yield "whole numbers", torch.zeros(value.shape, dtype=torch.int64)
    elif isinstance(value, float):
        yield "nan", math.nan
    elif isinstance(value, int) and not isinstance(value, bool):
        yield "negative", -3
        yield "half", 1.5
    elif isinstance(value, dict | list):
        yield "emptied", type(value)()
        yield "none", None


def damaged(state: dict[str, Any], path: tuple[Any, ...], damage: Any) -> dict[str, Any]:
    copied = copy.deepcopy(state)
    inside: Any = copied
    for key in path[:-1]:
        inside = inside[key]
    if damage is KeyError:
        del inside[path[-1]]
    else:
        inside[path[-1]] = damage
    return copied


def snapshot(optimizer: rkfac.KFAC) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def trained(fallback: str = "adamw", fisher: str = "empirical") -> tuple[nn.Module, rkfac.KFAC, dict[str, Any]]:
    """A state worth saving, then an optimizer two steps further on."""
    model = reader()
    optimizer = stated.RSKFAC(model, fallback=fallback, fisher=fisher, **SETTINGS)
    train(model, optimizer, [sentences() for _ in range(3)])
    saved = snapshot(optimizer)
    train(model, optimizer, [sentences() for _ in range(2)])
    return model, optimizer, saved


def honest(path: tuple[Any, ...], kind: str) -> bool:
    """Not a damage at all: a state that an honest run may have."""
    return (path[-1], kind) in {
        ("retired", "text"),  # any reason will do
        ("basis", "none"),  # not decomposed yet
        ("wanted", "emptied"),  # a step without statistics is next
        ("seed", "negative"),
    }


def assert_all_refused(
    optimizer: Any, saved: dict[str, Any], parts: list[str], skipped: Callable[[Any, str], bool], least: int
) -> None:
    """Every damage to these parts of a saved state is refused, and leaves the optimizer as it was."""
    before = snapshot(optimizer)
    accepted, changed, tried = [], [], 0
    for path in entries({part: saved[part] for part in parts}):
        value: Any = saved
        for key in path:
            value = value[key]
        for kind, damage in damages(value):
            if skipped(path, kind):
                continue
            tried += 1
            try:
                optimizer.load_state_dict(damaged(saved, path, damage))
            except ValueError:
                if not same(snapshot(optimizer), before):
                    changed.append((path, kind))
                    optimizer.load_state_dict(before)
            else:
                accepted.append((path, kind))
                optimizer.load_state_dict(before)
    assert tried > least
    assert not changed, changed
    assert not accepted, accepted


def test_every_damage_to_the_curvature_is_refused_and_changes_nothing() -> None:
    _, optimizer, saved = trained()
    assert_all_refused(optimizer, saved, ["curvature"], honest, 300)


def test_every_damage_to_buffers_and_groups_is_refused_and_changes_nothing() -> None:
    def no_buffers_yet(path: Any, kind: str) -> bool:
        """A parameter that got no gradient yet has none."""
        return path[0] == "state" and kind in ("deleted", "emptied") and path[-1] not in TOGETHER

    _, optimizer, saved = trained()
    assert_all_refused(optimizer, saved, ["state", "param_groups"], no_buffers_yet, 100)


def test_a_refused_state_leaves_a_run_that_goes_on_bit_for_bit() -> None:
    model, optimizer, saved = trained(fisher="mc")
    other = twin(model)
    reference = stated.RSKFAC(other, fallback="adamw", fisher="mc", **SETTINGS)
    reference.load_state_dict(snapshot(optimizer))
    last = list(saved["curvature"]["blocks"])[-1]
    del saved["curvature"]["blocks"][last]["factors"]["output"]["value"]
    with pytest.raises(ValueError, match="does not fit"):
        optimizer.load_state_dict(saved)
    batches = [sentences() for _ in range(3)]
    train(model, optimizer, batches)
    train(other, reference, batches)
    assert_same_parameters(model, other, exactly=True)


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rule": ({"damping_rule": "factored"}, {"damping_rule": "pi"}),
    "relative": ({}, {"relative_to": None}),
    "measure": ({}, {"relative_to": "mean"}),
    "graft": ({}, {"graft": "adamw"}),
    "no graft": ({}, {"graft": None}),
    "sharing": ({}, {"weight_sharing": "reduce"}),
    "average": ({}, {"loss_average": "sum"}),
    "fisher": ({}, {"fisher": "mc"}),
    "likelihood": ({"fisher": "mc"}, {"fisher": "mc", "likelihood": "gaussian"}),
    "start": ({}, {"factor_start": "identity"}),
    "decomposition": ({"decomposition": rkfac.RSVD()}, {"decomposition": rkfac.SREVD()}),
    "fallback": ({}, {"fallback": "adamw"}),
    "tail": ({}, {"tail": "trace"}),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_state_of_another_algorithm_is_refused(choice: str) -> None:
    model = mlp()
    mine, theirs = CHOICES[choice]
    first, second = stated.KFAC(model, rank=2, **mine), stated.KFAC(twin(model), rank=2, **theirs)
    step(model, first, rows())
    before = snapshot(second)
    with pytest.raises(ValueError, match="belongs to another algorithm"):
        second.load_state_dict(first.state_dict())
    assert same(snapshot(second), before)


def test_a_state_of_a_torch_optimizer_is_refused() -> None:
    model = mlp()
    optimizer = stated.KFAC(model)
    with pytest.raises(ValueError, match="not the state of an rkfac optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_scripting_works_unhooked_and_says_how_when_hooked() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, factor_every=1, inverse_every=1)
    with pytest.raises(Exception, match=r"with optimizer\.unhooked\(\)"):
        torch.jit.script(model)
    x, y = rows()
    with optimizer.unhooked(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(not record.reason for record in optimizer.report())  # the hooks are back

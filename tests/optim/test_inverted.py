"""Small layers: damped inverses in the place of eigenpairs, and the same steps."""

from __future__ import annotations

import copy
import warnings
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
from rkfac.curvature.block import kronecker
from rkfac.linalg import DecompositionError, Intact, lapack

# The recommended recipe's curvature, with short periods.
RUN: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.9,
    "relative_to": "mean",
    "damping": 1.0,
    "rank": "auto",
    "tail": "trace",
    "factor_every": 2,
    "inverse_every": 3,
}


def inverted(optimizer: rkfac.KFAC) -> set[str]:
    """Layers whose factors are kept as they are."""
    return {
        name
        for name, block in optimizer._blocks.items()
        if len(block.factors) == 2 and all(isinstance(f.low, Intact) for f in block.factors.values())
    }


def decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "INVERTED", 0)


@pytest.mark.parametrize("case", ["rows", "images", "channels last"])
@pytest.mark.parametrize("rule", ["factored", "pi"])
@pytest.mark.parametrize("start", ["unbiased", "identity", "paper", "dropped"])
@pytest.mark.parametrize("build", [stated.KFAC, stated.RSKFAC, stated.SREKFAC], ids=["KFAC", "RSKFAC", "SREKFAC"])
def test_the_steps_are_those_of_exact_eigenpairs(
    case: str, rule: str, start: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draw = (mlp(), rows) if case == "rows" else (convnet(), images)
    if case == "channels last":
        model = model.to(memory_format=torch.channels_last)
    other, batches, begin = twin(model), [draw() for _ in range(9)], parameters(model)
    settings = {**RUN, "damping_rule": rule, "factor_start": start}
    optimizer = build(model, **settings)
    train(model, optimizer, batches)
    assert inverted(optimizer) >= {"0"}
    decomposed(monkeypatch)
    plain = stated.KFAC(other, **settings)
    train(other, plain, batches)
    assert not inverted(plain)
    assert_same_parameters(model, other, rtol=1e-8, atol=1e-9)
    assert_moved(model, begin)


@pytest.mark.parametrize(
    "settings",
    [
        {"power": -0.5},
        {"damping_rule": "product"},
        {"relative_to": "largest"},
        {"rank": 3},
        {"tail": "zero"},
        {"apply": "backward"},
        {"sides": "input"},
        {"damping": 1e-6},
    ],
    ids=str,
)
def test_where_more_than_the_inverse_is_wanted_there_are_eigenpairs(settings: dict[str, Any]) -> None:
    """Or where the damping is so small that float32 has too few digits for an inverse."""
    model = mlp(dtype=torch.float32)
    optimizer = stated.RSKFAC(model, **{**RUN, **settings})
    train(model, optimizer, [rows(dtype=torch.float32) for _ in range(3)])
    assert not inverted(optimizer)


def test_wide_layers_have_eigenpairs_and_groups_too() -> None:
    wide = (
        nn.Linear(64, 700),
        nn.Tanh(),
        nn.Linear(700, 8),
    )  # the last of few entries: its inverse would be the dear part
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), *wide, nn.Tanh(), nn.Linear(8, 4))
    optimizer = stated.RSKFAC(model, **RUN)
    train(model, optimizer, [images(dtype=torch.float32)])
    assert inverted(optimizer) == {"6"}


@pytest.mark.parametrize("damping", [10.0, 0.05, 1e-7])
def test_a_damping_that_changes_between_two_refreshes_counts_at_once(
    damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(6)]
    settings = {**RUN, "inverse_every": 100}

    def run(model: nn.Module, optimizer: rkfac.KFAC) -> None:
        train(model, optimizer, batches[:3])
        optimizer.param_groups[0]["damping"] = damping
        train(model, optimizer, batches[3:])

    optimizer = stated.RSKFAC(model, **settings)
    run(model, optimizer)
    assert inverted(optimizer)
    decomposed(monkeypatch)
    run(other, stated.KFAC(other, **settings))
    assert_same_parameters(model, other, rtol=1e-6, atol=1e-8)


def test_a_factor_without_an_inverse_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Intact, damping: float) -> Any:
        raise DecompositionError("no inverse today")

    model = mlp()
    other, batches = twin(model), [rows() for _ in range(5)]
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(Intact, "_inverse", refuse)
        optimizer = stated.RSKFAC(model, **RUN)
        train(model, optimizer, batches)
    assert not inverted(optimizer)
    decomposed(monkeypatch)
    train(other, stated.RSKFAC(other, **RUN), batches)
    assert_same_parameters(model, other, exactly=True)


def test_no_eigenpairs_are_made_in_a_run_that_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("somebody asked for eigenpairs")

    monkeypatch.setattr(lapack, "eigenpairs", refuse)
    model = mlp(dtype=torch.float32)
    optimizer = stated.RSKFAC(model, **RUN)
    train(model, optimizer, [rows(dtype=torch.float32) for _ in range(7)])
    for layer in optimizer.report():
        assert (layer.rank_input, layer.rank_output) == (layer.input_dim, layer.output_dim)
        assert layer.captured_input == layer.captured_output == 1
    copy.deepcopy(optimizer.state_dict())


def test_a_run_is_resumed_bit_for_bit() -> None:
    model, batches = mlp(dtype=torch.float32), [rows(dtype=torch.float32) for _ in range(8)]
    optimizer = stated.RSKFAC(model, **RUN)
    train(model, optimizer, batches[:5])
    fresh = twin(model)
    resumed = stated.RSKFAC(fresh, **RUN)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert inverted(resumed) == inverted(optimizer) != set()
    for batch in batches[5:]:
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
    assert same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("damage", ["shape", "nan", "asymmetric", "scale", "shift"])
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str) -> None:
    model = mlp()
    optimizer = stated.RSKFAC(model, **RUN)
    train(model, optimizer, [rows() for _ in range(3)])
    state = copy.deepcopy(optimizer.state_dict())
    basis = state["curvature"]["blocks"]["0"]["factors"]["input"]["basis"]
    if damage == "shape":
        basis["matrix"] = basis["matrix"][:-1]
    elif damage == "nan":
        basis["matrix"][0, 0] = float("nan")
    elif damage == "asymmetric":
        basis["matrix"][0, 1] += 1
    else:
        basis[damage] = -1.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="saved"):
        optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), before)

"""`rows=` in a training run: resumed bit for bit, and part of what a saved state is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import rkfac
from optim import stated
from optim.problems import assert_moved, convnet, images, parameters, reader, same, sentences, step, train, twin

RUN: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "factor_every": 2, "inverse_every": 3, "rank": 3, "oversampling": 1}
CASES = {"images": (convnet, images), "text": (reader, sentences)}
each_case = pytest.mark.parametrize("case", CASES)


@each_case
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("shared", [False, True], ids=["seed", "generator"])
def test_a_resumed_run_draws_the_same_rows(case: str, fisher: str, shared: bool) -> None:
    make, draw = CASES[case]
    model, batches = make(), [draw() for _ in range(8)]
    settings = {**RUN, "rows": 6, "fisher": fisher}

    def build(model: Any, seed: int) -> rkfac.RSKFAC:
        generator = torch.Generator().manual_seed(seed) if shared else None
        return stated.RSKFAC(model, **settings, seed=seed, generator=generator)

    unsampled = twin(model)
    optimizer = build(model, 1)
    train(model, optimizer, batches[:5])
    fresh = twin(model)
    resumed = build(fresh, 2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = parameters(model)
    for batch in batches[5:]:
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
    assert same(resumed.state_dict(), optimizer.state_dict())
    assert same(parameters(fresh), parameters(model))
    assert_moved(model, start)
    train(unsampled, stated.RSKFAC(unsampled, **{**settings, "rows": None}, seed=1), batches)
    assert not same(parameters(unsampled), parameters(model)), "nothing was drawn"


@each_case
def test_more_rows_than_there_are_change_nothing(case: str) -> None:
    make, draw = CASES[case]
    model, batches = make(), [draw() for _ in range(5)]
    start, other = parameters(model), twin(model)
    optimizer, plain = stated.RSKFAC(model, **RUN, rows=10_000), stated.RSKFAC(other, **RUN)
    train(model, optimizer, batches)
    train(other, plain, batches)
    assert same(parameters(model), parameters(other))
    mine, theirs = optimizer.state_dict()["curvature"], plain.state_dict()["curvature"]
    assert same(mine["blocks"], theirs["blocks"])
    assert_moved(model, start)


def test_a_state_of_other_rows_is_refused() -> None:
    model = convnet()
    optimizer = stated.RSKFAC(model, rows=8)
    train(model, optimizer, [images()])
    with pytest.raises(ValueError, match="rows: 8 saved, all here"):
        stated.RSKFAC(twin(model)).load_state_dict(optimizer.state_dict())

"""SKFAC: against an independent implementation, its limits, and what it forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim import stated
from optim.problems import assert_same_parameters, convnet, images, mlp, rows, train, twin
from optim.test_bkfac import EVERY, steps_of, wide, wide_rows
from optim.test_trajectory import assert_follows, batches, in_numpys_words, network, weights_and_biases
from oracles import numpy_online


@pytest.mark.parametrize(
    "changes", [{}, {"factor_every": 2, "inverse_every": 6}], ids=["as it stands", "short periods"]
)
def test_thirty_steps_agree_with_numpy(changes: dict[str, Any]) -> None:
    """Batches of 12, 12 and 7: slots without a row only decay."""
    model, data = network(), batches()
    keywords = {
        **rkfac.paper_defaults(),
        "weight_decay": 0.0,
        "factor_start": "unbiased",
        "weight_sharing": "reduce",
        **changes,
    }
    optimizer = rkfac.SKFAC(model, **keywords)
    history, losses = numpy_online.train(
        weights_and_biases(model),
        data,
        kind=numpy_online.Columns,
        reduce=True,
        **in_numpys_words(keywords, "inverse_every"),
    )
    assert_follows(model, optimizer, data, history, losses)


@pytest.mark.parametrize(
    ("changes", "samples"),
    [({}, None), ({"tail": "trace", "factor_every": 1}, None), ({"rank": 3}, 3), ({"weight_sharing": "expand"}, None)],
    ids=["reduced", "trace", "few samples", "expanded"],
)
def test_thirty_steps_with_averages_of_moments_agree_with_numpy(changes: dict[str, Any], samples: int | None) -> None:
    """A factor is online where the first batch's 12 rows (a row a position, if expanded) and the modes leave room."""
    model, data = network(), [(x[:samples], y[:samples]) for x, y in batches()]
    keywords = {**rkfac.paper_defaults(), "weight_decay": 0.0, "weight_sharing": "reduce", "rank": 5}
    keywords |= {"factor_every": 2, "inverse_every": 6, **changes}
    optimizer = rkfac.SKFAC(model, averaging="moments", **keywords)
    history, losses = numpy_online.train(
        weights_and_biases(model),
        data,
        kind=numpy_online.Online,
        reduce=keywords["weight_sharing"] == "reduce",
        **in_numpys_words(keywords, "inverse_every"),
        tail=keywords["tail"],
    )
    assert_follows(model, optimizer, data, history, losses)
    online = [(r.kept_input == "online", r.kept_output == "online") for r in optimizer.report()]
    few, expanded = samples is not None, keywords["weight_sharing"] == "expand"
    assert online == [(not expanded, False), (True, few), (few, False)]


@pytest.mark.parametrize("n", [2, 5, 31, 45])
@pytest.mark.parametrize("averaging", ["columns", "moments"])
@pytest.mark.parametrize("rule", ["factored", "pi", "product"])
def test_without_memory_it_is_exact_kfac(n: int, averaging: str, rule: str) -> None:
    """Fewer rows than either side is wide, as many, and more."""
    model = wide()
    other = twin(model)
    settings = {"factor_decay": 0.0, "damping_rule": rule, "lr": 0.05, "factor_every": 1, "inverse_every": 1}
    optimizer = stated.SKFAC(model, **settings, averaging=averaging)
    exact = stated.KFAC(other, **settings)
    data = [wide_rows(n) for _ in range(4)]
    train(model, optimizer, data)
    train(other, exact, data)
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("averaging", ["columns", "moments"])
def test_convolutions_too(averaging: str) -> None:
    model = convnet()
    other = twin(model)
    settings = {"factor_decay": 0.0, "weight_sharing": "reduce", "lr": 0.05, "factor_every": 1, "inverse_every": 1}
    data = [images() for _ in range(3)]
    train(model, stated.SKFAC(model, **settings, averaging=averaging), data)
    train(other, stated.KFAC(other, **settings), data)
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


def test_with_memory_columns_and_moments_part() -> None:
    """Moments, while nothing is cut, go on being exact K-FAC; columns do not."""
    models = [wide() for _ in range(3)]
    settings = {"lr": 0.05, **EVERY}
    optimizers = [
        stated.SKFAC(models[0], rank=20, averaging="moments", **settings),
        stated.SKFAC(models[1], **settings),
        stated.KFAC(models[2], **settings),
    ]
    data = [wide_rows(2) for _ in range(6)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data)
    assert [r.kept_input for r in optimizers[0].report()] == ["online", "online"]
    assert [r.kept_input for r in optimizers[1].report()] == ["columns", "columns"]
    assert_same_parameters(models[0], models[2], rtol=1e-7, atol=1e-9)
    assert not torch.allclose(models[1][0].weight, models[2][0].weight, rtol=0, atol=1e-4)


def test_positions_are_reduced_by_default() -> None:
    assert rkfac.SKFAC(mlp())._settings.weight_sharing == "reduce"
    model = nn.Conv2d(2, 3, 3)
    optimizer = rkfac.SKFAC(model)
    model(torch.randn(5, 2, 6, 6)).square().mean().backward()
    optimizer.step()
    assert optimizer.report()[0].rank_input == 5


def test_no_matrix_of_the_width_squared_is_ever_formed() -> None:
    d = 16384
    assert steps_of(rkfac.SKFAC, d, decomposition=rkfac.RSVD()).entries < d * d / 4


def test_factors_of_any_width_are_covered() -> None:
    assert "0" in rkfac.SKFAC(wide(), max_factor_dim=20)._blocks
    assert "0" not in rkfac.SKFAC(wide(), max_factor_dim=20, averaging="moments", rows=None)._blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-18, 1e12])
def test_gradients_of_any_size_make_finite_steps(dtype: torch.dtype, size: float) -> None:
    model = wide(dtype)
    start = model[0].weight.detach().clone()
    optimizer = rkfac.SKFAC(model, lr=0.1 / size, **EVERY)
    for _ in range(4):
        x, y = wide_rows(dtype=dtype)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) * size).backward()
        optimizer.step()
    move = model[0].weight.detach() - start
    assert bool(torch.isfinite(move).all())
    assert float(move.abs().max()) > 1e-6


@pytest.mark.parametrize("value", ["factors", None, True])
def test_a_bad_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="averaging"):
        rkfac.SKFAC(mlp(), averaging=value)


def test_columns_and_moments_do_not_load_each_other_s_states() -> None:
    model = mlp()
    optimizer = rkfac.SKFAC(model)
    train(model, optimizer, [rows()])
    with pytest.raises(ValueError, match="method"):
        rkfac.SKFAC(model, averaging="moments").load_state_dict(optimizer.state_dict())

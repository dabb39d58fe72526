"""Thirty steps of the paper's preset against an independent NumPy implementation of Algorithms 1, 4 and 5."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rkfac
from oracles import numpy_kfac

STEPS = 30
OPTIMIZERS = {"exact": rkfac.KFAC, "rsvd": rkfac.RSKFAC, "srevd": rkfac.SREKFAC}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 9),
        nn.ReLU(),
        nn.Linear(9, 3),
    ]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((n, 2, 4, 4)), rng.integers(0, 3, n))
        for n in itertools.islice(itertools.cycle((12, 12, 7)), STEPS)
    ]


def weights_and_biases(model: nn.Sequential) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every layer that has them."""
    layers = [m for m in model if hasattr(m, "weight")]
    return [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in layers]


def assert_follows(
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    data: Sequence[tuple[np.ndarray, np.ndarray]],
    history: Sequence[Any],
    losses: Sequence[float],
) -> None:
    """The optimizer takes a reference's steps, from the losses before to the weights and biases after each."""
    for (images, labels), expected, loss in zip(data, history, losses, strict=True):
        value = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
        assert value.item() == pytest.approx(loss, abs=1e-8)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        for mine, theirs in zip(weights_and_biases(model), expected, strict=True):
            for own, its in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(own, its, rtol=0, atol=1e-8)


NUMPYS = {
    "lr": "learning_rate",
    "damping": "kappa",
    "factor_decay": "rho",
    "factor_every": "factor_period",
    "inverse_every": "inverse_period",
    "update_clip": "clip",
}


def in_numpys_words(keywords: dict[str, Any], *more: str) -> dict[str, Any]:
    """What every reference implementation is told, and `more` keywords, under its names for them."""
    told = ("lr", "damping", "factor_decay", "factor_every", "rank", "update_clip", *more)
    return {NUMPYS.get(name, name): keywords[name] for name in told}


@pytest.mark.parametrize("method", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"factor_every": 2, "inverse_every": 6, "weight_decay_from": 10, "rank": 5, "oversampling": 2}],
    ids=["section 5 as it stands", "short periods, low rank"],
)
def test_thirty_steps_agree_with_numpy(method: str, rule: str, changes: dict[str, Any]) -> None:
    model, data = network(), batches()
    keywords = {**rkfac.paper_defaults(), "damping_rule": rule, **changes}
    optimizer = OPTIMIZERS[method](model, **keywords, generator=torch.Generator().manual_seed(5))
    source = torch.Generator().manual_seed(5)
    history, losses = numpy_kfac.train(
        weights_and_biases(model),
        data,
        method=method,
        damping_rule="factor" if rule == "factored" else "product",
        draw=lambda d, p: torch.randn(d, p, dtype=torch.float64, generator=source).numpy(),
        **in_numpys_words(keywords, "inverse_every", "oversampling", "power_iterations"),
        weight_decay=keywords["weight_decay"],
        weight_decay_start=keywords["weight_decay_from"],
    )
    assert_follows(model, optimizer, data, history, losses)

"""Thirty steps of EK-FAC against an independent NumPy implementation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rkfac
from oracles import numpy_ekfac

STEPS = 30


def network() -> nn.Sequential:
    """Small beside its batches: every factor has full rank and eigenvectors that are all determined."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((n, 1, 3, 3)), rng.integers(0, 3, n))
        for n in itertools.islice(itertools.cycle((40, 40, 33)), STEPS)
    ]


SOAP: dict[str, Any] = {"moments": "running", "power": -0.5, "graft": "adamw", "lr": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "samples": {},
    "samples, largest": {"relative_to": "largest", "damping": 0.1},
    "samples, absolute": {"relative_to": None, "damping": 1e-3, "lr": 0.005},
    "samples, started anew": {"carry": False},
    "running": {"moments": "running"},
    "running, as published": {"moments": "running", "carry": False, "moment_decay": 0.75},
    "SOAP": SOAP,
}


@pytest.mark.parametrize("method", ["exact", "rsvd"])
@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_agree_with_numpy(method: str, case: str) -> None:
    keywords: dict[str, Any] = {"lr": 0.02, "damping": 0.5, "relative_to": "mean", "carry": True, "moments": "samples"}
    keywords |= {"factor_decay": 0.9, "factor_every": 2, "inverse_every": 6, "rank": 4, "oversampling": 2}
    keywords |= {"power_iterations": 2, "power": -1.0, "graft": None, **CASES[case]}
    model, data = network(), batches()
    optimizer = rkfac.EKFAC(
        model,
        **keywords,
        **({} if keywords["graft"] == "adamw" else {"momentum": 0.0}),
        weight_decay=0.0,
        decomposition=rkfac.Exact() if method == "exact" else rkfac.RSVD(),
        eager_start=False,
        warm_start=False,
        tail="zero",
        rows=None,
        generator=torch.Generator().manual_seed(5),
    )
    source = torch.Generator().manual_seed(5)
    layers = [m for m in model if hasattr(m, "weight")]
    history = numpy_ekfac.train(
        [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in layers],
        data,
        method=method,
        moments=keywords["moments"],
        carry=keywords["carry"],
        moment_decay=keywords.get("moment_decay", 0.95),
        measure=keywords["relative_to"],
        power=keywords["power"],
        learning_rate=keywords["lr"],
        damping=keywords["damping"],
        rho=keywords["factor_decay"],
        factor_period=keywords["factor_every"],
        inverse_period=keywords["inverse_every"],
        rank=keywords["rank"],
        oversampling=keywords["oversampling"],
        power_iterations=keywords["power_iterations"],
        draw=lambda d, p: torch.randn(d, p, dtype=torch.float64, generator=source).numpy(),
        betas=(0.9, 0.999) if keywords["graft"] == "adamw" else None,
    )
    for (images, labels), expected in zip(data, history, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        optimizer.step()
        for layer, (weight, bias) in zip(layers, expected, strict=True):
            np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=0, atol=1e-8)
            np.testing.assert_allclose(layer.bias.detach().numpy(), bias, rtol=0, atol=1e-8)

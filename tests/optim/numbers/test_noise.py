"""Rounding noise stays rounding noise: a sketch keeps no arbitrary directions of an identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated

datasets = pytest.importorskip("sklearn.datasets")


def losses(noise: float, start: Any, steps: int = 22) -> list[float]:
    """Of a 64-128-10 net on digits, its first weights multiplied by 1 + noise.

    Smooth: a unit that crosses the kink of a ReLU changes the gradient at once, under any optimizer.
    """
    digits = datasets.load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    order = torch.randperm(len(x))
    disturbance: list[Tensor] = [torch.randn_like(p) for p in model.parameters()]
    with torch.no_grad():
        for p, d in zip(model.parameters(), disturbance, strict=True):
            p.mul_(1 + noise * d)
    optimizer = stated.RSKFAC(model, rank=32, factor_start=start)
    found = []
    for i in range(steps):
        batch = order[128 * (i % 14) : 128 * (i % 14) + 128]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("start", ["identity", "unbiased"])
def test_noise_of_1e_7_and_other_threads_stay_below_1e_4(start: Any) -> None:
    torch.set_num_threads(1)
    plain = losses(0.0, start)
    assert plain[-1] < 0.95 * plain[0]
    noisy = losses(1e-7, start)
    torch.set_num_threads(2)
    threaded = losses(0.0, start)
    for other in (noisy, threaded):
        assert max(abs(a - b) / b for a, b in zip(other, plain, strict=True)) < 1e-4
    assert noisy != plain, "the noise must have arrived"

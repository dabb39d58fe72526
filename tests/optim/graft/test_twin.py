"""Grafted trajectories against a dense implementation that shares no line with the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optim import stated
from optim.problems import mlp, parameters, rows, step

STEPS = 10
Matrices = list[Tensor]


class Twin:
    """Three Linear layers [W | b], relu and tanh between them; explicit inverses; momentum written out.

    Running averages weigh statistic k of n by rho^(n - k), over the sum of weights; inverses are those of every second step.
    """

    def __init__(self, weights: Matrices, lr: float, damping: float, rho: float, decay: float) -> None:
        self.W = [w.clone() for w in weights]
        self.lr, self.damping, self.rho, self.decay = lr, damping, rho, decay
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in weights]
        self.inverses: list[tuple[Tensor, Tensor]] = []
        self.k = 0

    def gradients(self, x: Tensor, y: Tensor) -> Matrices:
        """By the chain rule; the statistics fall off on the way."""
        n = len(x)
        ones = torch.ones(n, 1, dtype=x.dtype)
        a0 = torch.cat([x, ones], 1)
        h1 = (a0 @ self.W[0].T).clamp_min(0)
        a1 = torch.cat([h1, ones], 1)
        h2 = torch.tanh(a1 @ self.W[1].T)
        a2 = torch.cat([h2, ones], 1)
        logits = a2 @ self.W[2].T
        g2 = (torch.softmax(logits, 1) - torch.eye(logits.shape[1], dtype=x.dtype)[y]) / n
        g1 = (g2 @ self.W[2][:, :-1]) * (1 - h2**2)
        g0 = (g1 @ self.W[1][:, :-1]) * (h1 > 0)
        for layer, (a, g) in enumerate(((a0, g0), (a1, g1), (a2, g2))):
            self.seen[layer].append((a.T @ a / n, n * g.T @ g))  # n g is the gradient of one sample's loss
        return [g.T @ a for a, g in ((a0, g0), (a1, g1), (a2, g2))]

    def invert(self) -> None:
        self.inverses = []
        for statistics in self.seen:
            weights = [self.rho ** (len(statistics) - 1 - i) for i in range(len(statistics))]
            pair = []
            for side in (0, 1):
                X = sum(w * s[side] for w, s in zip(weights, statistics, strict=True)) / sum(weights)
                mean = X.trace() / len(X)
                pair.append(torch.linalg.inv(X + self.damping * mean * torch.eye(len(X), dtype=X.dtype)))
            self.inverses.append((pair[0], pair[1]))

    def step(self, x: Tensor, y: Tensor) -> None:
        J = self.gradients(x, y)
        if self.k % 2 == 0:
            self.invert()
        for layer in range(3):
            vector, length, share = self.rule(layer, J[layer])
            A, G = self.inverses[layer]
            S = G @ vector @ A
            self.W[layer] = self.W[layer] - self.lr * (length / S.norm() * S + share * self.W[layer])
        self.k += 1

    def rule(self, layer: int, J: Tensor) -> tuple[Tensor, Tensor, float]:
        """What is preconditioned, how long it shall be, how much of the weights goes."""
        raise NotImplementedError


class WithSGD(Twin):
    """The buffer holds what torch's would; the weights in it are counted, and taken out before preconditioning."""

    def __init__(self, *args: Any, momentum: float, nesterov: bool, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.momentum, self.nesterov = momentum, nesterov
        self.m: Matrices = [torch.zeros_like(w) for w in self.W]
        self.count = [0.0] * 3

    def rule(self, layer: int, J: Tensor) -> tuple[Tensor, Tensor, float]:
        W, mu = self.W[layer], self.momentum
        self.m[layer] = mu * self.m[layer] + J + self.decay * W
        self.count[layer] = mu * self.count[layer] + self.decay
        step, share = self.m[layer], self.count[layer]
        if self.nesterov:
            step, share = J + self.decay * W + mu * step, self.decay + mu * share
        vector = step - share * W
        return vector, vector.norm(), share


class WithAdamW(Twin):
    """Both moments, bias corrected."""

    def __init__(self, *args: Any, betas: tuple[float, float], eps: float, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.betas, self.eps = betas, eps
        self.m: Matrices = [torch.zeros_like(w) for w in self.W]
        self.v: Matrices = [torch.zeros_like(w) for w in self.W]

    def rule(self, layer: int, J: Tensor) -> tuple[Tensor, Tensor, float]:
        b1, b2 = self.betas
        self.m[layer] = b1 * self.m[layer] + (1 - b1) * J
        self.v[layer] = b2 * self.v[layer] + (1 - b2) * J * J
        m, v = self.m[layer] / (1 - b1 ** (self.k + 1)), self.v[layer] / (1 - b2 ** (self.k + 1))
        return m, (m / (v.sqrt() + self.eps)).norm(), self.decay


CASES: list[tuple[type[Twin], str, dict[str, Any]]] = [
    (WithSGD, "sgd", {"momentum": 0.0, "nesterov": False}),
    (WithSGD, "sgd", {"momentum": 0.9, "nesterov": False}),
    (WithSGD, "sgd", {"momentum": 0.9, "nesterov": True}),
    (WithAdamW, "adamw", {"betas": (0.9, 0.999), "eps": 1e-8}),
    (WithAdamW, "adamw", {"betas": (0.6, 0.9), "eps": 1e-2}),
]


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("make, graft, numbers", CASES, ids=[f"{g} {n}" for _, g, n in CASES])
def test_ten_steps_agree_with_the_dense_twin(make: Any, graft: Any, numbers: dict[str, Any], decay: float) -> None:
    model, lr, damping, rho = mlp(), 0.05, 0.03, 0.8
    layers = ("0", "2", "4")

    def weights() -> Matrices:
        values = parameters(model)
        return [torch.cat([values[f"{n}.weight"], values[f"{n}.bias"][:, None]], 1) for n in layers]

    twin = make(weights(), lr, damping, rho, decay, **numbers)
    optimizer = stated.KFAC(
        model,
        lr=lr,
        graft=graft,
        **numbers,
        weight_decay=decay,
        damping=damping,
        relative_to="mean",
        factor_decay=rho,
        factor_every=1,
        inverse_every=2,
    )
    start = weights()
    for k in range(STEPS):
        batch = rows()
        step(model, optimizer, batch)
        twin.step(*batch)
        for got, expected in zip(weights(), twin.W, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9, msg=lambda text, k=k: f"step {k}: {text}")
    assert all((got - first).norm() > 0.005 for got, first in zip(weights(), start, strict=True))

"""Small models whose layers have every kind of block, with a batch each, and their curvature as dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac


class Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x))).flatten(1)


class Attention(nn.Module):
    """One layer of torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x, x, x, need_weights=False)[0]).flatten(1)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.build().double()

    def x(self) -> Tensor:
        torch.manual_seed(2)
        return torch.randint(0, self.tokens, self.shape) if self.tokens else torch.randn(self.shape).double()


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten())


CASES = [
    Case("linear", lambda: net(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5, bias=False)), (9, 4)),
    Case("one layer", lambda: nn.Linear(4, 3), (9, 4)),
    Case("frozen bias", lambda: _frozen(net(nn.Linear(4, 3))), (9, 4)),
    Case("convolution", lambda: net(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh()), (5, 2, 3, 3)),
    Case("channels last", lambda: net(nn.Conv2d(2, 3, 2)).to(memory_format=torch.channels_last), (5, 2, 3, 3)),
    Case("groups", lambda: net(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh()), (5, 4, 3, 3)),
    Case("depthwise", lambda: net(nn.Conv1d(3, 3, 2, groups=3, bias=False)), (6, 3, 4)),
    Case("embedding", lambda: net(nn.Embedding(5, 3), nn.Tanh()), (6, 2), tokens=4),
    Case("norms", lambda: net(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.LayerNorm(3), nn.RMSNorm(3)), (8, 4)),
    Case("scale alone", lambda: net(nn.LayerNorm(4, bias=False)), (8, 4)),
    Case("tied", Tied, (5, 3), tokens=5),
    Case("attention", Attention, (4, 3, 4)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))


def _frozen(model: nn.Module) -> nn.Module:
    model[0].bias.requires_grad_(False)
    return model


def loss(y: Tensor) -> Tensor:
    """With gradients that differ everywhere."""
    return (y.flatten(1).sin() + y.flatten(1).pow(3) / 3).sum(1).mean()


def trained(case: Case, kind: type[rkfac.KFAC] = rkfac.KFAC, steps: int = 1, **keywords: Any) -> rkfac.KFAC:
    """An optimizer after a few steps that move nothing."""
    model, x = case.model(), case.x()
    optimizer = kind(model, lr=0.0, **{"rows": None, "damping": 0.3, "factor_every": 1, "inverse_every": 1, **keywords})
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
    return optimizer


def dense(optimizer: rkfac.KFAC, name: str) -> Tensor:
    """The damped curvature of a layer, column by column: the block's own product with changes of the parameters."""
    block = optimizer._blocks[name]
    sizes = [p.numel() for p in block.parameters]
    columns = []
    for column in torch.eye(sum(sizes), dtype=torch.float64):
        parts = [part.view(p.shape) for part, p in zip(column.split(sizes), block.parameters, strict=True)]
        product = block.multiply(tuple(parts), optimizer.param_groups[0])
        columns.append(torch.cat([t.reshape(-1).double() for t in product]))
    return torch.stack(columns, 1)


def compare(operator: rkfac.Operator, C: Tensor, rtol: float = 1e-9) -> None:
    """Everything an operator can do, with a matrix in its place."""
    scale = float(C.abs().max())
    values, vectors = torch.linalg.eigh(C)
    assert float(values[0]) > 0
    torch.testing.assert_close(C, C.T, rtol=rtol, atol=rtol * scale)
    inverse, root = ((vectors * values**power) @ vectors.T for power in (-1.0, -0.5))
    assert operator.shape == tuple(C.shape)
    eye = torch.eye(len(C), dtype=torch.float64)
    for got, expected in (
        (operator @ eye, C),
        (operator.solve(eye), inverse),
        (operator.inverse @ eye, inverse),
        (operator.inverse.solve(eye), C),
        (operator.sqrt_solve(eye), root),
        (operator.power(-0.5) @ eye, root),
        (operator.diagonal(), C.diagonal()),
        (operator.inverse.diagonal(), inverse.diagonal()),
    ):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    v = torch.randn(len(C), dtype=torch.float64)
    torch.testing.assert_close(operator @ v, C @ v, rtol=rtol, atol=rtol * scale * len(C))
    assert operator.trace() == pytest.approx(float(C.trace()), rel=rtol)
    assert operator.logdet() == pytest.approx(float(torch.linalg.slogdet(C)[1]), rel=rtol, abs=rtol * len(C))
    assert operator.inverse.logdet() == pytest.approx(-operator.logdet(), rel=1e-12)

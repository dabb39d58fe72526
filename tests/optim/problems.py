"""Small models, batches and comparisons the optimizer tests share."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers.lookalikes import OwnRMSNorm, Transposed
from rkfac.linalg.symmetric import mirrored, unfolded

Batch = tuple[Tensor, Tensor]


def mlp(inplace: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers only: 6 inputs, 4 classes."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4)).to(dtype)


def convnet(inplace: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Convolutions (one grouped), BatchNorm, Linear: images (n, 2, 6, 6), 4 classes."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.ReLU(inplace),
        nn.Flatten(),
        nn.Linear(24, 4),
    ).to(dtype)


class Reader(nn.Module):
    """Every kind of block and an uncovered parameter: tokens (n, 5) below 9, 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.hidden(self.norm(self.embedding(tokens))))
        return self.head((h * self.scale).mean(1))


def reader(dtype: torch.dtype = torch.float64) -> Reader:
    return Reader().to(dtype)


class Speaker(nn.Module):
    """A table that is the head too, attention, a transposed Linear layer, a norm of one's own: tokens (n, 5), 9 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.memory = nn.MultiheadAttention(6, 3, bias=False)
        self.mix, self.norm = Transposed(6, 6), OwnRMSNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.encoder(self.table(tokens))
        seen = self.memory(h[:, :2].transpose(0, 1), *2 * (h.transpose(0, 1),), need_weights=False)[0]
        return self.head(self.norm(torch.tanh(self.mix(seen.mean(0)))))


def speaker(dtype: torch.dtype = torch.float64) -> Speaker:
    return Speaker().to(dtype)


def rows(n: int = 12, dtype: torch.dtype = torch.float64) -> Batch:
    return torch.randn(n, 6, dtype=dtype), torch.randint(4, (n,))


def images(n: int = 8, dtype: torch.dtype = torch.float64) -> Batch:
    return torch.randn(n, 2, 6, 6, dtype=dtype), torch.randint(4, (n,))


def sentences(n: int = 8) -> Batch:
    return torch.randint(9, (n, 5)), torch.randint(4, (n,))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """The ordinary training step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> None:
    for batch in batches:
        step(model, optimizer, batch)


def twin(model: nn.Module) -> nn.Module:
    """The same model again, before any optimizer saw it."""
    return copy.deepcopy(model)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies by name, torch.compile's prefix removed."""
    return {name.removeprefix("_orig_mod."): p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(got: nn.Module, expected: nn.Module, *, exactly: bool = False, **tolerance: float) -> None:
    mine, theirs = parameters(got), parameters(expected)
    assert mine.keys() == theirs.keys()
    bounds = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-9, "atol": 1e-10, **tolerance}
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], **bounds, msg=lambda text, name=name: f"{name}: {text}")


def assert_moved(model: nn.Module, start: dict[str, Tensor]) -> None:
    """Guards the comparisons above: what never moves is equal to anything."""
    mine = parameters(model)
    for name, value in start.items():
        assert not torch.equal(mine[name], value), f"{name} never moved"


def average(state: dict[str, Any]) -> Tensor:
    """A running factor from its saved state: 2^exponent * value + identity * I, or the diagonal alone."""
    saved, unit = state["value"], 2.0 ** (0 if math.isinf(state["level"]) else math.ceil(state["level"]))
    if saved.ndim == 1:
        return saved * unit + state["identity"]
    d = min(saved.shape[-1], 2 * saved.shape[-2])
    value = mirrored(unfolded(saved, d), d) * unit
    return value + state["identity"] * torch.eye(value.shape[-1], dtype=value.dtype)


def averages(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All running factors that saw a statistic, by layer and side."""
    return {
        f"{name}.{side}": average(state)
        for name, block in optimizer.state_dict()["curvature"]["blocks"].items()
        for side, state in block["factors"].items()
        if state["value"] is not None and state["value"].numel()  # a side that is left out has none
    }


def updates(optimizer: torch.optim.Optimizer) -> set[int]:
    """How many statistics the running factors have seen."""
    blocks = optimizer.state_dict()["curvature"]["blocks"].values()
    return {factor["updates"] for block in blocks for factor in block["factors"].values()}


def assert_same_averages(
    got: torch.optim.Optimizer, expected: torch.optim.Optimizer, *, exactly: bool = False, **tolerance: float
) -> None:
    mine, theirs = averages(got), averages(expected)
    assert mine.keys() == theirs.keys()
    bounds = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-9, "atol": 1e-12, **tolerance}
    for name, value in mine.items():
        assert value.abs().max() > 0, f"{name} is empty: nothing was compared"
        torch.testing.assert_close(value, theirs[name], **bounds, msg=lambda text, name=name: f"{name}: {text}")


def same(first: Any, second: Any) -> bool:
    """Nested states, bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, Sequence) and not isinstance(first, str):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)

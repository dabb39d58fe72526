"""What torch's SGD and AdamW would do with the gradients a run met, kept by hand and in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from optim.problems import step

GRAFTS: dict[str, list[dict[str, Any]]] = {
    "sgd": [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.0, "weight_decay": 0.3},
        {"momentum": 0.9, "weight_decay": 0.3, "weight_decay_from": 2},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.3},
    ],
    "adamw": [
        {},
        {"betas": (0.8, 0.95), "eps": 1e-3},
        {"weight_decay": 0.3, "weight_decay_from": 2},
    ],
}
RULES = [(graft, numbers) for graft, all_numbers in GRAFTS.items() for numbers in all_numbers]


def name_of(rule: Any) -> str:
    return " ".join([rule[0], *(f"{key} {value}" for key, value in rule[1].items())])


@dataclass
class SGD:
    """Direction (decay left out) and how many times the parameter is decayed, one parameter."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    weight_decay_from: int = 0
    steps: int = 0
    buffer: Tensor | float = 0.0
    share: float = 0.0

    def __call__(self, p: Tensor, g: Tensor) -> tuple[Tensor, float]:
        decay = self.weight_decay if self.steps >= self.weight_decay_from else 0.0
        self.steps += 1
        self.buffer = self.momentum * self.buffer + g + decay * p
        self.share = self.momentum * self.share + decay
        vector, share = self.buffer, self.share
        if self.nesterov:
            vector, share = g + decay * p + self.momentum * self.buffer, decay + self.momentum * self.share
        return vector - share * p, share


@dataclass
class AdamW:
    """The same of AdamW; `mean` is what is preconditioned."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_from: int = 0
    steps: int = 0
    mean: Tensor | float = 0.0
    square: Tensor | float = 0.0

    def __call__(self, p: Tensor, g: Tensor) -> tuple[Tensor, float]:
        decay = self.weight_decay if self.steps >= self.weight_decay_from else 0.0
        self.steps += 1
        first, second = self.betas
        self.mean = first * self.mean + (1 - first) * g
        self.square = second * self.square + (1 - second) * g * g
        denominator = (self.square / (1 - second**self.steps)).sqrt() + self.eps
        return self.mean / (1 - first**self.steps) / denominator, decay


HANDS = {"sgd": SGD, "adamw": AdamW}


@dataclass
class Watched:
    """A model in training, and what the plain rule would have done on every step of it."""

    model: nn.Module
    optimizer: Any
    graft: str
    numbers: dict[str, Any]
    hands: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.hands = {name: HANDS[self.graft](**self.numbers) for name, _ in self.model.named_parameters()}

    def step(self, batch: Any, lr: float) -> None:
        """One step: `moved` (decay undone, in units of lr) and `plain` (the rule's own direction), by parameter."""
        before = {name: p.detach().double().clone() for name, p in self.model.named_parameters()}
        step(self.model, self.optimizer, batch)
        self.observe(before, lr)

    def observe(self, before: dict[str, Tensor], lr: float) -> None:
        self.moved: dict[str, Tensor] = {}
        self.plain: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.plain[name], share = self.hands[name](before[name], p.grad.double())
            self.moved[name] = (before[name] - p.detach().double()) / lr - share * before[name]

    def layers(self) -> dict[str, list[str]]:
        """Names of the parameters of every preconditioned layer."""
        return {
            r.name: [f"{r.name}.{n}" for n, _ in self.model.get_submodule(r.name).named_parameters(recurse=False)]
            for r in self.optimizer.report()
            if r.covered
        }


def joined(values: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([values[name].flatten() for name in names])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))

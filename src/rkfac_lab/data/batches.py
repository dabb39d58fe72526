"""The order in which training samples come, as a state that can be saved in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Batches:
    """A fresh permutation each epoch and random augmentation, both from one generator; keeps the last short batch."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        seed: int,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    ) -> None:
        self.x, self.y, self.batch_size, self.augment = x, y, batch_size, augment
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.empty(0, dtype=torch.long)
        self.position = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.x) // self.batch_size)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no batch left, as before the first shuffle."""
        return self.position >= len(self.permutation)

    def shuffle(self) -> None:
        """Begin an epoch."""
        self.permutation = torch.randperm(len(self.x), generator=self.generator)
        self.position = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch."""
        chosen = self.permutation[self.position : self.position + self.batch_size].to(self.x.device)
        self.position += len(chosen)
        x = self.x[chosen]
        return (self.augment(x, self.generator) if self.augment else x), self.y[chosen]

    def state_dict(self) -> dict[str, Any]:
        """All that decides the batches to come."""
        return {
            "permutation": self.permutation,
            "position": self.position,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; an order of other samples is refused."""
        permutation, position = state["permutation"], state["position"]
        samples = torch.arange(len(self.x))
        if len(permutation) and not torch.equal(permutation.sort().values, samples):
            raise ValueError(f"the order of the samples is not one of {len(self.x)} samples")
        if not 0 <= position <= len(permutation):
            raise ValueError(f"position {position} in an order of {len(permutation)} samples")
        self.permutation, self.position = permutation, position
        self.generator.set_state(state["generator"])

"""A layer's preconditioned gradient, ready to be added to its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """S = scale * parts, one tensor a parameter and in its shape, for the vectors it was made from.

    Parts have entries of about one and `scale` is a float64 number on the device, so that S may be larger or smaller than
    a float32 can be: what reaches a parameter is only ever the product with a learning rate and a clip.
    """

    parts: tuple[Tensor, ...]
    scale: Tensor
    gradients: tuple[Tensor, ...]

    @cached_property
    def _lengths(self) -> Tensor:
        """Of each part, without the scale."""
        return torch.stack([torch.linalg.vector_norm(part).double() for part in self.parts])

    @cached_property
    def norm(self) -> Tensor:
        """||S||, in float64; not finite exactly when an entry is not."""
        return torch.linalg.vector_norm(self._lengths) * self.scale

    def norm_of(self, indices: list[int]) -> Tensor:
        """The same of some parts alone."""
        return torch.linalg.vector_norm(self._lengths[indices]) * self.scale

    @cached_property
    def inner(self) -> Tensor:
        """<S, J>, in float64."""
        terms = [(part * g).sum().double() for part, g in zip(self.parts, self.gradients, strict=True)]
        return torch.stack(terms).sum() * self.scale

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(part.numel() for part in self.parts)

    def masked(self, keep: Tensor) -> Direction:
        """The same where `keep` (one truth value on the device) holds, zero elsewhere; without a synchronisation."""
        parts = tuple(torch.where(keep, part, torch.zeros_like(part)) for part in self.parts)
        return replace(self, parts=parts, scale=torch.where(keep, self.scale, torch.zeros_like(self.scale)))

    def add_to(self, index: int, target: Tensor, factor: Tensor | float = 1.0) -> None:
        """target += factor * one part of S, in place."""
        part = self.parts[index]
        amount = (self.scale * factor).to(part.dtype)
        if target.dtype == part.dtype:
            target.addcmul_(part, amount)
        else:
            target.add_((part * amount).to(target.dtype))

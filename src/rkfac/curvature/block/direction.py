"""A layer's preconditioned gradient, ready to be added to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg import Part, Terms


@dataclass(frozen=True, eq=False)
class Direction:
    """S = scale * parts, one a parameter, for the vectors it was made from.

    Parts have entries of about one and `scale` is a float64 number on the device, so that S may be larger or smaller than
    a float32 can be: what reaches a parameter is only ever the product with a learning rate and a clip. A part may know
    itself as a correction of the vector it was made from, and then asks for that again when it is added to something.
    """

    parts: tuple[Part, ...]
    scale: Tensor
    size: int  # number of entries
    given: Callable[[], Tensor]  # length of the vectors, in float64; asked for where a step shall have it
    length: Tensor  # ||S|| in units of the scale, in float64
    along: Callable[[], Tensor]  # <S, vectors> in units of the scale, in float64; asked for by the KL clip alone

    @property
    def norm(self) -> Tensor:
        """||S||, in float64; not finite exactly when an entry is not."""
        return self.length * self.scale

    @property
    def inner(self) -> Tensor:
        """<S, J>, in float64."""
        return self.along() * self.scale

    def norm_of(self, indices: Sequence[int], vectors: Sequence[Tensor]) -> Tensor:
        """||S|| of some parts alone, which are formed for it."""
        lengths = [torch.linalg.vector_norm(self.parts[i].formed(vectors[i], [(vectors[i], 1.0)])) for i in indices]
        return torch.linalg.vector_norm(torch.stack(lengths)) * self.scale

    def masked(self, keep: Tensor) -> Direction:
        """The same where `keep` (one truth value on the device) holds, zero elsewhere; without a synchronisation."""
        nothing = torch.zeros_like(self.scale)
        scale, length = torch.where(keep, self.scale, nothing), torch.where(keep, self.length, nothing)
        parts = tuple(part.masked(keep) for part in self.parts)
        return replace(
            self, parts=parts, scale=scale, length=length, along=lambda: torch.where(keep, self.along(), nothing)
        )

    def add_to(
        self, index: int, target: Tensor, factor: Tensor | float = 1.0, terms: Terms = (), keep: float = 1.0
    ) -> None:
        """target <- keep * target + factor * one part of S, in place; `terms` add up to the vector S was made from."""
        self.parts[index].add_to(target, self.scale * factor, terms, keep)

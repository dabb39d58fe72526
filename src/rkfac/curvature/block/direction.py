"""A layer's preconditioned gradient, ready to be added to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg import Number, Part, Terms, kept, number


@dataclass(frozen=True, eq=False)
class Direction:
    """S = scale * parts, one a parameter, for the vectors it was made from.

    Parts have entries of about one and `scale` is a number beside them, so that S may be larger or smaller than
    a float32 can be: what reaches a parameter is only ever the product with a learning rate and a clip. A part may know
    itself as a correction of the vector it was made from, and then asks for that again when it is added to something.
    """

    parts: tuple[Part, ...]
    scale: Number
    size: int  # number of entries
    given: Callable[[], Number]  # length of the vectors; asked for where a step shall have it
    length: Number  # ||S|| in units of the scale
    along: Callable[[], Number]  # <S, vectors> in units of the scale; asked for by the KL clip alone

    @property
    def norm(self) -> Number:
        """||S||; not finite exactly when an entry is not."""
        return self.length * self.scale

    @property
    def inner(self) -> Number:
        """<S, J>."""
        return self.along() * self.scale

    def norm_of(self, indices: Sequence[int], vectors: Sequence[Tensor]) -> Number:
        """||S|| of some parts alone, which are formed for it."""
        lengths = [torch.linalg.vector_norm(self.parts[i].formed(vectors[i], [(vectors[i], 1.0)])) for i in indices]
        return number(torch.linalg.vector_norm(torch.stack(lengths))) * self.scale

    def masked(self, keep: Tensor) -> Direction:
        """The same where `keep` (one truth value on the device) holds, zero elsewhere; without a synchronisation."""
        parts = tuple(part.masked(keep) for part in self.parts)
        return replace(
            self,
            parts=parts,
            scale=kept(self.scale, keep),
            length=kept(self.length, keep),
            along=lambda: kept(self.along(), keep),
        )

    def add_to(self, index: int, target: Tensor, factor: Number = 1.0, terms: Terms = (), keep: float = 1.0) -> None:
        """target <- keep * target + factor * one part of S, in place; `terms` add up to the vector S was made from."""
        self.parts[index].add_to(target, self.scale * factor, terms, keep)

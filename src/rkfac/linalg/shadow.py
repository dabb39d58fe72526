"""The shadow of a gradient on the kept modes of both factors: U_G^T J and J U_A, all that a two-sided solve asks of J.

From J itself it takes 4 r d_G d_A flops, the larger part of a solve. Where J is a sum of few rows g a^T it is had from those for
4 r n (d_G + d_A), and since it is linear in J, the shadow of a running sum follows from the shadows of its terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.shapes import Float

# Roundings (eps ||J||) by which a shadow that was followed may differ from what is seen: looking makes half of them itself.
AGREEMENT = 48


@dataclass(frozen=True, eq=False)
class Shadow:
    """U_G^T [J | j] and [J | j] U_A; a bias's gradient j is the last column."""

    output: Float[Tensor, "rg da"]
    input: Float[Tensor, "dg ra"]

    def mixed(self, own: float, other: Shadow | None, share: float) -> Shadow:
        """own * this + share * other: the shadow of the same mixture of two matrices."""
        if other is None:
            return self if own == 1.0 else Shadow(self.output * own, self.input * own)
        return Shadow(
            torch.add(self.output * own, other.output, alpha=share),
            torch.add(self.input * own, other.input, alpha=share),
        )


def projections(
    U_G: Float[Tensor, "*batch dg rg"],
    U_A: Float[Tensor, "*batch da ra"],
    J: Float[Tensor, "*batch dg dw"],
    j: Float[Tensor, "*batch dg"] | None,
    onto_inputs: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """U_G^T [J | j] and, where they are asked for, [J | j] U_A; a bias's gradient j is the last column."""
    output, input = U_G.mT @ J, J @ U_A[..., : J.shape[-1], :] if onto_inputs else None
    if j is None:
        return output, input
    output = torch.cat([output, U_G.mT @ j[..., None]], dim=-1)
    return output, None if input is None else input + j[..., :, None] * U_A[..., -1:, :]


class Modes:
    """The kept modes of a layer's two factors, and two fixed directions to look at a matrix along."""

    def __init__(self, U_G: Float[Tensor, "dg rg"], U_A: Float[Tensor, "da ra"], number: int) -> None:
        self.U_G, self.U_A = U_G, U_A
        generator = torch.Generator().manual_seed(number)  # a resumed run looks along the same
        across, down = (torch.randn(len(U), generator=generator, dtype=torch.float64) for U in (U_A, U_G))
        self.across, self.down = across.to(U_A), down.to(U_G)

    def of(self, J: Float[Tensor, "dg dw"], j: Float[Tensor, "dg"] | None) -> Shadow:
        """The shadow of a matrix."""
        output, input = projections(self.U_G, self.U_A, J, j)
        assert input is not None
        return Shadow(output, input)

    def of_rows(self, g: Float[Tensor, "n dg"], a: Float[Tensor, "n dw"], last: Float[Tensor, "n"] | None) -> Shadow:
        """The shadow of sum g a^T; `last` is the last entry of every a, apart from the others."""
        kept_g, kept_a = g @ self.U_G, a @ self.U_A[: a.shape[-1]]
        output = kept_g.mT @ a
        if last is not None:
            output, kept_a = torch.cat([output, (kept_g.mT @ last)[:, None]], dim=1), kept_a.addr_(last, self.U_A[-1])
        return Shadow(output, g.mT @ kept_a)

    def looked_at(self, J: Float[Tensor, "dg dw"], j: Float[Tensor, "dg"] | None) -> Float[Tensor, "k"]:
        """What the shadow of a matrix is along the two directions, for one pass over the matrix each."""
        width = J.shape[-1]
        beside, below = J @ self.across[:width], self.down @ J
        if j is not None:
            beside, below = beside + self.across[-1] * j, torch.cat([below, (self.down @ j)[None]])
        return torch.cat([self.U_G.mT @ beside, below @ self.U_A])

    def seen(self, shadow: Shadow) -> Float[Tensor, "k"]:
        """The same of a shadow that is known."""
        return torch.cat([shadow.output @ self.across, self.down @ shadow.input])

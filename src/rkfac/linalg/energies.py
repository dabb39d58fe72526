"""Second moments of a gradient's coordinates in a pair of bases: what EK-FAC has in the place of products of eigenvalues.

With U_G, U_A the kept bases, a gradient J has coordinates K = U_G^T J U_A and a rest on either side. One matrix holds the mean
squares of all of them: M11 for the kept pairs, and in one more row and column m10, m01 and m00, each the mean over all
coordinates that it stands for. Where nothing was discarded on a side its rest is zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.multipliers import Diagonal, Multipliers, normalised
from rkfac.linalg.scaling import unit_of
from rkfac.linalg.shapes import Float

VANISHED = 2.0**-800  # zero for every purpose, and the inverse of less would leave the range of float64


@dataclass(frozen=True, eq=False)
class Energies:
    """M = [[M11, m10], [m01, m00]] in float64; `beyond` are the d_G - r_G and d_A - r_A coordinates of the two rests.

    `weight` is what the past weighs in the running average: 0 for a start that the first statistic replaces.
    """

    means: Float[Tensor, "*batch rg1 ra1"]
    beyond: tuple[int, int]
    weight: Float[Tensor, ""]

    @property
    def largest(self) -> Float[Tensor, "*batch"]:
        """Of the kept pairs, a number a group."""
        return self.means[..., :-1, :-1].amax((-2, -1))

    def trace(self) -> Float[Tensor, "*batch"]:
        """Sum over all d_G d_A coordinates, a number a group: the mean of ||J||^2."""
        g, a = (_counts(n, rest, self.means) for n, rest in zip(self.means.shape[-2:], self.beyond, strict=True))
        return self.means @ a @ g

    def mean(self) -> Float[Tensor, "*batch"]:
        """Over all coordinates, a number a group."""
        d_G, d_A = (n - 1 + rest for n, rest in zip(self.means.shape[-2:], self.beyond, strict=True))
        return self.trace() / (d_G * d_A)

    def multipliers(self, damping: Float[Tensor, "*batch"], power: float = -1.0) -> Multipliers:
        """(M + damping)^power: what happens to the four blocks of a gradient."""
        powers = (self.means + damping[..., None, None]) ** power
        g, a = (float(rest > 0) for rest in self.beyond)
        return normalised(
            powers[..., :-1, :-1], a * powers[..., :-1, -1], g * powers[..., -1, :-1], g * a * powers[..., -1, -1]
        )

    def blended(self, new: Float[Tensor, "*batch rg1 ra1"], decay: float) -> Energies:
        """The running average with one more statistic; unchanged, without a synchronisation, where that is not finite."""
        past = decay * self.weight
        weight = past + (1 - decay)
        means = (past / weight) * self.means + ((1 - decay) / weight) * new
        means = torch.where(means < VANISHED, torch.zeros_like(means), means)  # NaN stays what it is
        finite = torch.isfinite(means).all()
        return replace(
            self, means=torch.where(finite, means, self.means), weight=torch.where(finite, weight, self.weight)
        )

    def carried(self, shares_G: Tensor | None, shares_A: Tensor | None) -> Energies:
        """The same in another pair of bases, as if coordinates were uncorrelated; the trace stays what it was.

        A new mode has the energies of the old ones, rest included, by its squared overlaps with them (`LowRank.shares_of`);
        None: that side is what it was.
        """
        means = self.means if shares_G is None else shares_G @ self.means
        means = means if shares_A is None else means @ shares_A.mT
        g, a = (n + rest for n, rest in zip(self.means.shape[-2:], self.beyond, strict=True))
        return replace(self, means=means, beyond=(g - means.shape[-2], a - means.shape[-1]))

    def to(self, device: torch.device) -> Energies:
        """On another device."""
        return replace(self, means=self.means.to(device), weight=self.weight.to(device))


def of_product(G: LowRank, A: LowRank | Diagonal, weight: float) -> Energies:
    """Products of eigenvalues: what they would be if inputs and output gradients were independent (K-FAC)."""
    means = with_rest(G)[..., :, None] * with_rest(A)[..., None, :]
    return Energies(means, _beyond(G, A), means.new_tensor(weight))


def of_rows(
    G: LowRank, A: LowRank, g: Float[Tensor, "*batch n s dg"], a: Float[Tensor, "*batch n s da"]
) -> Float[Tensor, "*batch rg1 ra1"]:
    """Squared coordinates of the gradients sum_s g a^T of n samples, summed; 2 n r_G r_A flops where s is one."""
    samples = g.shape[-3:-1]
    unit_g, unit_a = unit_of([g]), unit_of([a])
    # Each side in its own units: the square of any product of two float32 is a number in float64.
    y, g_rest = G.split((g / unit_g).flatten(-3, -2))
    z, a_rest = A.split((a / unit_a).flatten(-3, -2))
    beyond, size = _beyond(G, A), (unit_g * unit_a).square()
    if samples[1] == 1:
        return (_squares(y, g_rest, beyond[0]).mT @ _squares(z, a_rest, beyond[1])) * size
    dtype = torch.promote_types(y.dtype, z.dtype)
    y, g_rest, z, a_rest = (t.to(dtype).unflatten(-2, samples) for t in (y, g_rest, z, a_rest))
    K, L, R, corner = (left.mT @ right for left in (y, g_rest) for right in (z, a_rest))
    return _joined(K, L, R, corner, beyond).sum(-3) * size


def of_lookups(G: LowRank, entries: int, tokens: Tensor, g: Float[Tensor, "n dg"]) -> Float[Tensor, "rg1 ra1"]:
    """The same for one-hot inputs, given by which of their entries is one; every lookup is a sample."""
    unit = unit_of([g])
    squares = _squares(*G.split(g / unit), G.dim - G.rank)
    means = squares.new_zeros(entries + 1, squares.shape[-1]).index_add_(0, tokens, squares)
    return means.mT * unit.square()


def of_matrix(G: LowRank, A: LowRank | Diagonal, J: Float[Tensor, "*batch dg da"]) -> Float[Tensor, "*batch rg1 ra1"]:
    """Squared coordinates of one gradient; 4 (r_G + r_A) d_G d_A flops."""
    unit = unit_of([J])
    P, below = G.split((J / unit).mT)
    (K, L), (R, corner) = A.split(P.mT), A.split(below.mT)
    return _joined(K, L, R, corner, _beyond(G, A)) * unit.square()


def _squares(kept: Tensor, rest: Tensor, beyond: int) -> Tensor:
    """Of a row's kept coordinates, and the mean of the others."""
    return torch.cat([kept.double().square(), rest.double().square().sum(-1, keepdim=True) / max(beyond, 1)], -1)


def _joined(K: Tensor, L: Tensor, R: Tensor, corner: Tensor, beyond: tuple[int, int]) -> Tensor:
    """Squares of the four blocks of a gradient, kept x kept, kept x rest, rest x kept, rest x rest."""
    K, L, R, corner = (t.double().square() for t in (K, L, R, corner))
    g, a = (max(count, 1) for count in beyond)
    top = torch.cat([K, L.sum(-1, keepdim=True) / a], -1)
    bottom = torch.cat([R.sum(-2, keepdim=True) / g, corner.sum((-2, -1))[..., None, None] / (g * a)], -1)
    return torch.cat([top, bottom], -2)


def _beyond(G: LowRank, A: LowRank | Diagonal) -> tuple[int, int]:
    return G.dim - G.rank, A.dim - A.rank


def with_rest(low: LowRank | Diagonal) -> Float[Tensor, "*batch r1"]:
    """The kept eigenvalues and then that of the rest, zero where nothing was discarded; in float64."""
    fill = low.fill.double()
    return torch.cat([low.s.double(), (torch.zeros_like(fill) if low.full else fill)[..., None]], -1)


def _counts(n: int, rest: int, like: Tensor) -> Tensor:
    """How many coordinates each entry stands for."""
    counts = like.new_ones(n)
    counts[-1] = rest
    return counts

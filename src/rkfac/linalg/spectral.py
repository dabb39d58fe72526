"""A symmetric positive matrix that acts on matrices, known by two bases and one eigenvalue for every pair of their modes.

With U_G, U_A the kept modes of the two sides, C V = U_G [s11 * (U_G^T V U_A)] U_A^T plus what happens to the rests: where modes
were discarded on a side, one more row (column) of `values` says what all pairs with a discarded mode have as eigenvalue. Every
power of C has the same modes, so that products, solves, roots, determinant, trace and diagonal are all had from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg.energies import with_rest
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.multipliers import Diagonal
from rkfac.linalg.orthonormal import polished
from rkfac.linalg.shapes import Float


@dataclass(frozen=True, eq=False)
class Basis:
    """Kept modes of one side, orthonormal to the precision of float64; U is None where the coordinates themselves are modes."""

    U: Float[Tensor, "*batch d r"] | None
    dim: int

    @property
    def beyond(self) -> int:
        """How many modes were discarded."""
        return 0 if self.U is None else self.dim - self.U.shape[-1]

    def split(
        self, V: Float[Tensor, "*more n d"]
    ) -> tuple[Float[Tensor, "*more n r"], Float[Tensor, "*more n d"] | None]:
        """Coordinates of rows, and what is left of the rows beyond the kept modes (None: nothing)."""
        if self.U is None:
            return V, None
        kept = V @ self.U
        return kept, V - kept @ self.U.mT if self.beyond else None

    def rows(self, kept: Float[Tensor, "*more n r"]) -> Float[Tensor, "*more n d"]:
        """Rows of these coordinates."""
        return kept if self.U is None else kept @ self.U.mT

    def spread(self, values: Float[Tensor, "*more n r1"]) -> Float[Tensor, "*more n d"]:
        """The diagonals of sum_i values_i u_i u_i^T + rest (I - U U^T), a row each."""
        if self.U is None:
            return values[..., :-1]
        squares = self.U.square().mT
        spread = values[..., :-1] @ squares
        return spread + values[..., -1:] * (1 - squares.sum(-2, keepdim=True)) if self.beyond else spread

    def counts(self, like: Tensor) -> Float[Tensor, "r1"]:
        """How many modes each entry of a row of values stands for."""
        kept = self.dim - self.beyond
        return torch.cat([like.new_ones(kept), like.new_full((1,), float(self.beyond))])


@dataclass(frozen=True, eq=False)
class Spectral:
    """C as the module says, all of it in float64; a batch of them (groups, units) acts on a batch of matrices."""

    output: Basis
    input: Basis
    values: Float[Tensor, "*batch rg1 ra1"]

    def __matmul__(self, V: Float[Tensor, "*more dg da"]) -> Float[Tensor, "*more dg da"]:
        """C V for as many matrices as there are; 4 (r_G + r_A) d_G d_A flops each."""
        above, below = self.output.split(V.mT)
        total = self.output.rows(self._weighed(above.mT, self.values[..., :-1, :]).mT).mT
        return total if below is None else total + self._weighed(below.mT, self.values[..., -1:, :])

    def _weighed(self, rows: Tensor, values: Tensor) -> Tensor:
        """Rows multiplied on the input side, each by eigenvalues of its own."""
        kept, rest = self.input.split(rows)
        weighed = self.input.rows(kept * values[..., :-1])
        return weighed if rest is None else weighed + rest * values[..., -1:]

    def to_power(self, power: float) -> Spectral:
        """C^power; ValueError where that does not exist."""
        if power < 0:
            self._require_definite()
        return replace(self, values=self.values**power)

    def logdet(self) -> Float[Tensor, ""]:
        """Of the whole batch."""
        self._require_definite()
        return self._total(self.values.log())

    def trace(self) -> Float[Tensor, ""]:
        """Of the whole batch."""
        return self._total(self.values)

    def diagonal(self) -> Float[Tensor, "*batch dg da"]:
        """diag(C) in the shape of the matrices it acts on: what an entry alone is multiplied by."""
        return self.output.spread(self.input.spread(self.values).mT).mT

    def _total(self, values: Tensor) -> Tensor:
        g, a = self.output.counts(values), self.input.counts(values)
        return (values @ a @ g).sum()

    def _require_definite(self) -> None:
        if not bool((self.values > 0).all()):
            raise ValueError("this curvature has eigenvalues of zero and no inverse: give it a positive damping")


def spectral(G: LowRank | Diagonal, A: LowRank | Diagonal, values: Float[Tensor, "*batch rg1 ra1"]) -> Spectral:
    """Bases of two factors with these eigenvalues; what stands for no mode is ignored."""
    output, input = _basis(G), _basis(A)
    g, a = output.counts(values), input.counts(values)
    return Spectral(output, input, torch.where(g[:, None] * a > 0, values, torch.ones_like(values)))


def products(
    G: LowRank | Diagonal, A: LowRank | Diagonal, damping_G: float | Tensor = 0.0, damping_A: float | Tensor = 0.0
) -> Float[Tensor, "*batch rg1 ra1"]:
    """Eigenvalues of (A + l_A I) (x) (G + l_G I), a row a mode of G, rests last; dampings are a number a group."""
    g, a = (
        with_rest(low) + torch.as_tensor(l, dtype=torch.float64, device=low.s.device)[..., None]
        for low, l in ((G, damping_G), (A, damping_A))
    )
    return g[..., :, None] * a[..., None, :]


def _basis(low: LowRank | Diagonal) -> Basis:
    return Basis(None if isinstance(low, Diagonal) else polished(low.U.contiguous()), low.dim)

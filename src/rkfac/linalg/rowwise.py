"""A Kronecker inverse applied to the rows that a gradient is the sum of, and undone again.

For J = sum g a^T the preconditioned gradient is sum (G^-1 g) (A^-1 a)^T: 4 r N (d_G + d_A) flops for N rows, where the solve
on J itself takes 4 (r_G + r_A) d_G d_A. Everything is in units of the largest multiplier, so that it has the size of J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.host import Number, number
from rkfac.linalg.kronecker import TOLERATED, Seer
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.multipliers import Multipliers, Overlapping
from rkfac.linalg.shadow import projections
from rkfac.linalg.shapes import Float

Projections = tuple[Tensor, Tensor | None, Tensor | None, Number]


@dataclass(frozen=True, eq=False)
class Side:
    """One damped inverse: U diag(kept) U^T + rest (I - U U^T), at most one; `rest` None: nothing was discarded."""

    U: Float[Tensor, "d r"]
    kept: Float[Tensor, "r"]
    rest: Float[Tensor, ""] | None

    def __call__(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Every row times the matrix."""
        inside = rows @ self.U
        if self.rest is None:
            return (inside * self.kept) @ self.U.mT
        return torch.addmm(rows, inside * (self.kept / self.rest - 1), self.U.mT).mul_(self.rest)

    def beside_one(self, rows: Float[Tensor, "n dw"]) -> tuple[Float[Tensor, "n dw"], Float[Tensor, "n"]]:
        """Every row [row | 1] times the matrix, the last column apart: a copy of all rows beside a one would be odd."""
        U, last = self.U[:-1], self.U[-1]
        inside = rows @ U + last
        if self.rest is None:
            inside = inside * self.kept
            return inside @ U.mT, inside @ last
        inside = inside * (self.kept / self.rest - 1)
        return torch.addmm(rows, inside, U.mT).mul_(self.rest), (inside @ last + 1).mul_(self.rest)

    def to(self, dtype: torch.dtype) -> Side:
        """The same in another precision."""
        return Side(self.U.to(dtype), self.kept.to(dtype), None if self.rest is None else self.rest.to(dtype))

    @property
    def inverse(self) -> Side:
        """What undoes it."""
        return Side(self.U, 1 / self.kept, None if self.rest is None else 1 / self.rest)

    def left_(self, W: Float[Tensor, "d n"], b: Float[Tensor, "d"] | None) -> None:
        """The matrix times [W | b], in place and without another matrix of their size where something was discarded."""
        if self.rest is None:
            W.copy_(self(W.mT).mT)
        else:
            W.addmm_(self.U * (self.kept / self.rest - 1), self.U.mT @ W).mul_(self.rest)
        if b is not None:
            b.copy_(self(b[None])[0])

    def right_(self, W: Float[Tensor, "n dw"], b: Float[Tensor, "n"] | None) -> None:
        """[W | b] times the matrix, in place; b is the last column."""
        U = self.U[: W.shape[1]]
        inside = W @ U if b is None else (W @ U).addr_(b, self.U[-1])
        if self.rest is None:
            torch.mm(inside * self.kept, U.mT, out=W)
            if b is not None:
                torch.mv(inside * self.kept, self.U[-1], out=b)
            return
        inside *= self.kept / self.rest - 1
        W.addmm_(inside, U.mT).mul_(self.rest)
        if b is not None:
            b.addmv_(inside, self.U[-1]).mul_(self.rest)


class Rowwise:
    """Both sides, and the lengths before and after of what was preconditioned row by row."""

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        if m.sides is None:
            raise ValueError("this damping does not act on each side alone: rows cannot be preconditioned apart")
        if A.U.dtype != G.U.dtype:
            A, G = (LowRank(low.U.double(), low.s, low.tail) for low in (A, G))
        g, g_rest, a, a_rest = m.sides
        self.scale, self.dtype = number(m.scale), G.U.dtype
        self.G, self.A = _side(G, g, g_rest), _side(A, a, a_rest)
        self.projects = not (G.full or A.full)  # whether lengths ask for projections onto the kept modes of both sides
        spread = max(
            float((t / t[t > 0].amin()).amax()) for t in (torch.cat([g, g_rest[None]]), torch.cat([a, a_rest[None]]))
        )
        self.precise = torch.finfo(self.dtype).eps * spread <= TOLERATED  # whether rows keep digits enough
        blocks = m.both, m.output, m.input, m.rest
        both, output, input, rest = (_reciprocal(t) for t in blocks)
        self._inner = Overlapping(both, output, input, rest, G.full, A.full)
        both, output, input, rest = (t.square() for t in (both, output, input, rest))
        self._before = Overlapping(both, output, input, rest, G.full, A.full)

    def of(
        self, g: Float[Tensor, "n dg"], a: Float[Tensor, "n dw"], bias: bool
    ) -> tuple[Float[Tensor, "n dg"], Float[Tensor, "n dw"], Float[Tensor, "n"] | None]:
        """Both sides' rows, preconditioned, and what becomes of the ones that a bias has for its input."""
        if not bias:
            return self.G(g), self.A(a), None
        return self.G(g), *self.A.beside_one(a)

    def projections(self, S: Tensor, s: Tensor | None, square: Number, seer: Seer | None = None) -> Projections:
        """Of [S | s] (in units, ||[S | s]||^2 = square) onto the kept modes: what its lengths before follow from."""
        if seer is not None and self.projects:
            shadow = seer(S, s, square)
            return shadow.output @ self.A.U, shadow.output, shadow.input, square
        P, R = projections(self.G.U, self.A.U, S, s, self.G.rest is not None)
        return P @ self.A.U, None if self.A.rest is None else P, R, square

    def before(self, known: Projections) -> Number:
        """||J||^2 for the J that was preconditioned."""
        return number(self._before.total(*known))

    def inner(self, known: Projections) -> Number:
        """<S, J>."""
        return number(self._inner.total(*known))

    def carry_(self, W: Float[Tensor, "dg dw"], b: Float[Tensor, "dg"] | None, before: Rowwise | None) -> None:
        """[W | b], preconditioned by `before` (None: not at all), preconditioned by this one instead; in place."""
        if before is not None:
            before.undo_(W, b)
        self.G.to(W.dtype).left_(W, b)
        self.A.to(W.dtype).right_(W, b)

    def undo_(self, W: Float[Tensor, "dg dw"], b: Float[Tensor, "dg"] | None) -> None:
        """Back to what was not preconditioned, in place."""
        self.G.to(W.dtype).inverse.left_(W, b)
        self.A.to(W.dtype).inverse.right_(W, b)


def _side(low: LowRank, kept: Tensor, rest: Tensor) -> Side:
    unit = torch.maximum(kept.amax(), rest.amax())
    return Side(low.U, (kept / unit).to(low.U), None if low.full else (rest / unit).to(low.U))


def _reciprocal(t: Tensor) -> Tensor:
    """Of what exists."""
    return torch.where(t > 0, 1 / torch.where(t > 0, t, 1.0), 0.0)

"""`LowRank`: the one value every decomposition returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.checks import require_positive
from rkfac.linalg.orthonormal import polished
from rkfac.linalg.scaling import times
from rkfac.linalg.shapes import Float


def relative(apart: float, whole: float) -> float:
    """sqrt(apart / whole), both squares of lengths: 0 for two that are nothing, infinite for something beside nothing."""
    apart = max(apart, 0.0)
    return math.sqrt(apart / whole) if whole > 0 else (math.inf if apart > 0 else 0.0)


@dataclass(frozen=True, eq=False)
class LowRank:
    """A symmetric PSD matrix by its leading eigenpairs: X ~ U diag(s) U^T + tail (I - U U^T).

    `U` (..., d, r) has orthonormal columns, `s` (..., r) is descending. `tail` is None when the discarded spectrum counts
    as zero (the paper) and a tensor of the batch's shape when it is replaced by a constant that preserves the trace.

    `s` and `tail` may be float64 beside a float32 `U`: what is formed from them is formed in float64, and only ratios near
    one are rounded to the dtype of U, so that a spectrum of any size can be kept as it is.
    """

    U: Float[Tensor, "*batch d r"]
    s: Float[Tensor, "*batch r"]
    tail: Float[Tensor, "*batch"] | None = None

    @property
    def dim(self) -> int:
        """Size d of the matrix that is approximated."""
        return self.U.shape[-2]

    @property
    def rank(self) -> int:
        """Number r of eigenpairs kept."""
        return self.U.shape[-1]

    @property
    def full(self) -> bool:
        """Whether no spectrum was discarded (r = d)."""
        return self.rank == self.dim

    @property
    def fill(self) -> Float[Tensor, "*batch"]:
        """Eigenvalue that stands for every discarded one: the tail, or zero."""
        return self.s.new_zeros(self.s.shape[:-1]) if self.tail is None else self.tail

    @property
    def largest(self) -> Float[Tensor, "*batch"]:
        """Largest eigenvalue, or a bound on it where it is not known without a decomposition."""
        return self.s.amax(-1)

    def trace(self) -> Float[Tensor, "*batch"]:
        """Trace of the approximation, tail included."""
        return (self.s.double().sum(-1) + (self.dim - self.rank) * self.fill.double()).to(self.s.dtype)

    def dense(self) -> Float[Tensor, "*batch d d"]:
        """The approximation as a d x d matrix (for inspection and tests; O(d^2 r))."""
        weights, fill, size = self._ratios(self.U.dtype)
        low = (self.U * weights[..., None, :]) @ self.U.mT
        low.diagonal(dim1=-2, dim2=-1).add_(fill[..., None])
        return times(low, size)

    def __matmul__(self, V: Float[Tensor, "*batch d k"]) -> Float[Tensor, "*batch d k"]:
        """The approximation times V, in O(d r k)."""
        weights, fill, size = self._ratios(V.dtype)
        U = self.U.to(V.dtype)
        product = U @ (weights[..., :, None] * (U.mT @ V))
        return times(product if self.tail is None else product + fill[..., None, None] * V, size)

    def truncate(self, rank: int) -> LowRank:
        """Keep the leading `rank` pairs; with a tail the trace stays what it was, without one it shrinks."""
        require_positive(rank, "rank")
        if rank >= self.rank:
            return self
        tail = None
        if self.tail is not None:
            cut = self.s[..., rank:].double().sum(-1) + (self.dim - self.rank) * self.tail.double()
            tail = (cut / (self.dim - rank)).to(self.tail.dtype)
        return LowRank(self.U[..., :rank].contiguous(), self.s[..., :rank].contiguous(), tail)

    def permuted(self, order: Tensor) -> LowRank:
        """The same matrix with rows and columns in another order."""
        return LowRank(self.U[..., order, :], self.s, self.tail)

    def split(self, V: Float[Tensor, "*batch n d"]) -> tuple[Float[Tensor, "*batch n r"], Float[Tensor, "*batch n k"]]:
        """Coordinates V U of rows, and what is left of the rows beyond the kept modes (no columns where that is nothing)."""
        V = V.to(self.U.dtype)
        kept = V @ self.U
        return kept, V[..., :0] if self.full else V - kept @ self.U.mT

    def distinct(self) -> LowRank:
        """Without the kept modes that share the smallest eigenvalue there is, or that of the rest, with others.

        Nobody can tell such modes from one another: which of them a solver returns is rounding.
        """
        bottom = self.s[..., -1] if self.full else torch.minimum(self.s[..., -1], self.fill)
        margin = torch.finfo(self.U.dtype).eps * self.dim * self.s[..., 0]
        told = int((self.s > (bottom + margin)[..., None]).sum(-1).max())
        if told >= self.dim - 1:
            return self
        # Of a whole spectrum nothing was discarded, and nothing is now: those that go leave their mean.
        whole = LowRank(self.U, self.s, self.fill) if self.full else self
        return whole.truncate(max(told, 1))

    def shares_of(self, other: LowRank) -> Float[Tensor, "*batch own others"]:
        """How a mode of this basis, or the mean of its rest (last row), is made of another's modes and rest (last column).

        Squared overlaps in float64: rows sum to one where the last column counts for d - r coordinates, and what goes
        from one basis to the other, times the coordinates it stands for, stays the same in all.
        """
        overlaps = (polished(self.U).mT @ polished(other.U)).square()
        of_rest = (1 - overlaps.sum(-1)).clamp_min(0)
        left = self.dim - self.rank
        to_rest = (1 - overlaps.sum(-2)).clamp_min(0)
        between = ((other.dim - other.rank) - of_rest.sum(-1)).clamp_min(0)
        last = torch.cat([to_rest, between[..., None]], -1) / max(left, 1) * (left > 0)
        return torch.cat([torch.cat([overlaps, of_rest[..., None]], -1), last[..., None, :]], -2)

    def with_trace(self, trace: Float[Tensor, "*batch"]) -> LowRank:
        """The same pairs with the discarded spectrum filled so that the whole trace is `trace`."""
        missing = (trace.double() - self.s.double().sum(-1)).clamp_min(0)
        return LowRank(self.U, self.s, (missing / max(self.dim - self.rank, 1)).to(self.s.dtype))

    def shifted(self, by: float | Tensor, scale: float | Tensor = 1.0) -> LowRank:
        """scale * X + by * I: the same basis, the spectrum moved (in float64, which it keeps).

        What was discarded moves too, so a tail appears where there was none, unless `by` is zero. A tensor holds one
        value a matrix of the batch.
        """
        shift = torch.as_tensor(by, dtype=torch.float64, device=self.s.device)
        factor = torch.as_tensor(scale, dtype=torch.float64, device=self.s.device)
        if isinstance(scale, int | float) and not 0 <= scale < math.inf:
            raise ValueError(f"scale must be finite and not negative, got {scale}")
        s = factor[..., None] * self.s.double() + shift[..., None]
        if self.tail is None and not bool(shift.any()):
            return LowRank(self.U, s)
        return LowRank(self.U, s, factor * self.fill.double() + shift)

    def distance(self, other: LowRank) -> float:
        """||X - Y||_F / ||Y||_F over the whole batch, Y being `other`, both with their tails; O(d r_X r_Y).

        With a = s_X - t_X, b = s_Y - t_Y, C = U_X^T U_Y and t = t_X - t_Y, the square of the upper one is
        |a|^2 + |b|^2 - 2 a^T (C o C) b + d t^2 + 2 t (sum a - sum b).
        """
        if self.U.shape[:-1] != other.U.shape[:-1]:
            raise ValueError(f"bases of {tuple(self.U.shape)} and {tuple(other.U.shape)} cannot be compared")
        size = torch.stack([low.s.amax().double() for low in (self, other)] + [self.fill.amax(), other.fill.amax()])
        unit = size.amax().clamp_min(torch.finfo(torch.float64).tiny)
        s_X, s_Y, t_X, t_Y = (v.double() / unit for v in (self.s, other.s, self.fill, other.fill))
        a, b, t = s_X - t_X[..., None], s_Y - t_Y[..., None], t_X - t_Y
        U = torch.promote_types(self.U.dtype, other.U.dtype)
        overlap = (self.U.to(U).mT @ other.U.to(U)).double().square()
        cross = (a[..., :, None] * overlap * b[..., None, :]).sum()
        apart = a.square().sum() + b.square().sum() - 2 * cross
        apart = apart + (self.dim * t.square() + 2 * t * (a.sum(-1) - b.sum(-1))).sum()
        whole = s_Y.square().sum() + (other.dim - other.rank) * t_Y.square().sum()
        return relative(float(apart), float(whole))

    def solve(
        self, V: Float[Tensor, "*batch m k"], damping: float | Tensor, side: str = "left"
    ) -> Float[Tensor, "*batch m k"]:
        """(X + damping I)^-1 V, or V (X + damping I)^-1 with side="right"; O(d r k), paper's equation (13).

        (V + U diag((t - s) / (s + l)) U^T V) / (t + l) with t the tail: equation (13) for t = 0, written so that
        nothing cancels when s is small and only the last factor has the size of the inverse.
        """
        if side == "right":
            return self.solve(V.mT, damping).mT
        if side != "left":
            raise ValueError(f"side must be 'left' or 'right', got {side!r}")
        if V.shape[-2] != self.dim:
            raise ValueError(f"cannot solve with V of shape {tuple(V.shape)}: the matrix is {self.dim} x {self.dim}")
        if isinstance(damping, int | float) and not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}")
        U = self.U.to(V.dtype)
        projected = U.mT @ V
        s, l = self.s.double(), torch.as_tensor(damping, dtype=torch.float64, device=self.s.device)[..., None]
        if self.full:
            least = s[..., -1:] + l
            return times(U @ ((least / (s + l)).to(V.dtype)[..., :, None] * projected), 1 / least[..., 0])
        t = self.fill.double()[..., None]
        weights = ((t - s) / (s + l)).to(V.dtype)
        return times(V + U @ (weights[..., :, None] * projected), 1 / (t + l)[..., 0])

    def _ratios(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """s - fill and fill in units of the largest eigenvalue, and that eigenvalue in float64."""
        s, fill = self.s.double(), self.fill.double()
        size = torch.cat([s, fill[..., None]], dim=-1).abs().amax(-1).clamp_min(torch.finfo(torch.float64).tiny)
        return ((s - fill[..., None]) / size[..., None]).to(dtype), (fill / size).to(dtype), size

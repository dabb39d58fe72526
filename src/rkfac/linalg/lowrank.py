"""`LowRank`: the one value every decomposition returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.checks import require_positive
from rkfac.linalg.shapes import Float


@dataclass(frozen=True, eq=False)
class LowRank:
    """A symmetric PSD matrix by its leading eigenpairs: X ~ U diag(s) U^T + tail (I - U U^T).

    `U` (..., d, r) has orthonormal columns, `s` (..., r) is descending. `tail` is None when the discarded spectrum counts
    as zero (the paper) and a tensor of the batch's shape when it is replaced by a constant that preserves the trace.
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

    def trace(self) -> Float[Tensor, "*batch"]:
        """Trace of the approximation, tail included."""
        return self.s.sum(-1) + (self.dim - self.rank) * self.fill

    def dense(self) -> Float[Tensor, "*batch d d"]:
        """The approximation as a d x d matrix (for inspection and tests; O(d^2 r))."""
        fill = self.fill[..., None]
        low = (self.U * (self.s - fill)[..., None, :]) @ self.U.mT
        low.diagonal(dim1=-2, dim2=-1).add_(fill)
        return low

    def __matmul__(self, V: Float[Tensor, "*batch d k"]) -> Float[Tensor, "*batch d k"]:
        """The approximation times V, in O(d r k)."""
        fill = self.fill[..., None, None]
        return self.U @ ((self.s[..., :, None] - fill) * (self.U.mT @ V)) + fill * V

    def truncate(self, rank: int) -> LowRank:
        """Keep the leading `rank` pairs; with a tail the trace stays what it was, without one it shrinks."""
        require_positive(rank, "rank")
        if rank >= self.rank:
            return self
        kept = self.s[..., :rank]
        tail = None if self.tail is None else (self.trace() - kept.sum(-1)).clamp_min(0) / (self.dim - rank)
        return LowRank(self.U[..., :rank].contiguous(), kept.contiguous(), tail)

    def with_trace(self, trace: Float[Tensor, "*batch"]) -> LowRank:
        """The same pairs with the discarded spectrum filled so that the whole trace is `trace`."""
        missing = (trace - self.s.sum(-1)).clamp_min(0)
        return LowRank(self.U, self.s, missing / max(self.dim - self.rank, 1))

    def solve(
        self, V: Float[Tensor, "*batch m k"], damping: float | Tensor, side: str = "left"
    ) -> Float[Tensor, "*batch m k"]:
        """(X + damping I)^-1 V, or V (X + damping I)^-1 with side="right"; O(d r k), paper's equation (11).

        V / (t + l) + U diag((t - s) / ((s + l)(t + l))) U^T V with t the tail: equation (11) for t = 0, written so that
        nothing cancels when s is small.
        """
        if side == "right":
            return self.solve(V.mT, damping).mT
        if side != "left":
            raise ValueError(f"side must be 'left' or 'right', got {side!r}")
        if V.shape[-2] != self.dim:
            raise ValueError(f"cannot solve with V of shape {tuple(V.shape)}: the matrix is {self.dim} x {self.dim}")
        if isinstance(damping, int | float) and not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}")
        l = torch.as_tensor(damping, dtype=self.s.dtype, device=self.s.device)[..., None]
        projected = self.U.mT @ V
        if self.full:
            return self.U @ (projected / (self.s + l)[..., :, None])
        t = self.fill[..., None]
        weights = (t - self.s) / ((self.s + l) * (t + l))
        return self.U @ (weights[..., :, None] * projected) + V / (t + l)[..., None]

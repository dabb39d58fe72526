"""Exact eigendecomposition, with symmetrising and a float64 retry."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg.checks import (
    DecompositionError,
    LinAlgError,
    require_positive,
    require_square,
    require_symmetric,
    require_tail,
)
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.shapes import Float


def eigh(
    X: Float[Tensor, "*batch d d"], rank: int | None = None, *, tail: str = "zero", name: str = "the matrix"
) -> LowRank:
    """Leading eigenpairs of a symmetric PSD matrix, all of them by default; 4-9 d^3 flops.

    Rounding leaves small negative eigenvalues; they become zero. `name` is what an error calls the matrix.
    """
    require_square(X, name)
    require_symmetric(X, name)
    require_tail(tail)
    if rank is not None:
        require_positive(rank, "rank")
    s, U = symmetric_eigenpairs((X + X.mT) / 2, name)
    rounding = 100 * X.shape[-1] * torch.finfo(X.dtype).eps
    if bool((s[..., -1] < -rounding * s[..., 0].abs().clamp_min(torch.finfo(X.dtype).tiny)).any()):
        raise ValueError(
            f"{name} is not positive semi-definite: its smallest eigenvalue is {float(s[..., -1].min()):.3g}"
        )
    low = LowRank(U, s.clamp_min(0), s.new_zeros(s.shape[:-1]) if tail == "trace" else None)
    return low if rank is None else low.truncate(rank)


def symmetric_eigenpairs(C: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending) and eigenvectors; retried in float64 when the solver fails or returns NaN."""
    s, U = _attempt(C)
    if s is None and C.dtype == torch.float32:
        s, U = _attempt(C.double())
    if s is None or U is None:
        raise DecompositionError(
            f"the eigendecomposition of {name} ({C.shape[-1]} x {C.shape[-1]}) failed, also in float64"
        )
    return s.flip(-1).to(C.dtype), U.flip(-1).to(C.dtype)


def _attempt(C: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Ascending eigenpairs, or Nones where LAPACK gives up or answers with NaN."""
    try:
        s, U = torch.linalg.eigh(C)
    except LinAlgError:
        return None, None
    return (s, U) if bool(torch.isfinite(s).all()) and bool(torch.isfinite(U).all()) else (None, None)

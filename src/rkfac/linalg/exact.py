"""Exact eigendecompositions: of a matrix, symmetrised, and of the square of thin columns."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg import lapack
from rkfac.linalg.checks import (
    DecompositionError,
    require_finite,
    require_positive,
    require_shift,
    require_square,
    require_symmetric,
    require_tail,
)
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.operand import unscaled
from rkfac.linalg.orthonormal import orthonormal
from rkfac.linalg.scaling import magnitude, unit_scale
from rkfac.linalg.shapes import Float


def eigh(
    X: Float[Tensor, "*batch d d"],
    rank: int | None = None,
    *,
    tail: str = "zero",
    name: str = "the matrix",
    shift: float = 0.0,
) -> LowRank:
    """Leading eigenpairs of a symmetric PSD matrix X + shift I, all of them by default; 4-9 d^3 flops.

    Rounding leaves small negative eigenvalues; they become zero. `name` is what an error calls the matrix.
    """
    require_square(X, name)
    require_shift(shift, X.dtype)
    require_tail(tail)
    if rank is not None:
        require_positive(rank, "rank")
    peak = magnitude(X, (-2, -1))[..., 0, 0]
    require_finite(peak, name)
    scale = unit_scale(peak.clamp_min(abs(shift)))
    half = X * (scale / 2)[..., None, None]
    require_symmetric(half, name)
    s, U = lapack.eigenpairs(half + half.mT, name)
    offset = (scale.double() * shift).to(X.dtype)[..., None]
    # A sum of many outer products is positive semi-definite up to the rounding of that sum, which may have been made in
    # float32 whatever X is now.
    known = max(100 * X.shape[-1] * torch.finfo(X.dtype).eps, torch.finfo(torch.float32).eps ** 0.5)
    rounding = known * (s[..., :1].abs() + offset.abs())
    s = s + offset
    if bool((s[..., -1:] < -rounding).any()):
        least = float((s[..., -1] / scale).min())
        raise DecompositionError(f"{name} is not positive semi-definite: its smallest eigenvalue is {least:.3g}")
    low = LowRank(U, s.clamp_min(0), s.new_zeros(s.shape[:-1]) if tail == "trace" else None)
    return unscaled(low if rank is None else low.truncate(rank), scale, name)


def of_columns(C: Float[Tensor, "*batch d n"], tail: str = "zero", name: str = "the columns") -> LowRank:
    """All eigenpairs of C C^T, min(d, n) of them, without that matrix: C = Q R and the SVD of R; O(d n^2 + n^3).

    In the precision of C and not of its square. What is left out is zero, so that a "trace" tail is zero too.
    """
    require_tail(tail)
    if C.ndim < 2 or C.shape[-1] == 0:
        raise ValueError(f"{name} must have shape (d, n) with at least one column, got {tuple(C.shape)}")
    peak = magnitude(C, (-2, -1))[..., 0, 0]
    require_finite(peak, name)
    unit = unit_scale(peak)
    C = C * unit[..., None, None]
    Q, R = orthonormal(C, name) if C.shape[-1] <= C.shape[-2] else lapack.qr(C, name)
    left, sigma = lapack.left_singular(R, name)
    s = (sigma.double() / unit.double()[..., None]).square()
    return LowRank(Q @ left, s, s.new_zeros(s.shape[:-1]) if tail == "trace" else None)

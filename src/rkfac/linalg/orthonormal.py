"""Thin QR: CholeskyQR2 where it is faster and safe, Householder elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg import lapack
from rkfac.linalg.checks import DecompositionError, require_finite
from rkfac.linalg.scaling import magnitude, unit_scale
from rkfac.linalg.shapes import Float


def orthonormal(
    Y: Float[Tensor, "*batch d p"], name: str = "the columns"
) -> tuple[Float[Tensor, "*batch d p"], Float[Tensor, "*batch p p"]]:
    """Y = Q R with orthonormal Q (d x p, p <= d), also when Y is rank deficient.

    CholeskyQR2 is two Gram products and two triangular solves: half the time of Householder for tall Y on CPUs, far less
    on GPUs. It squares the condition number, so columns are scaled to unit length first and its answer is taken only if
    the first pass already came out nearly orthonormal; otherwise Householder, which is safe for any Y.
    """
    scale = column_scale(Y, name)
    Y = Y * scale
    factors = _cholesky_qr2(Y, name) if Y.shape[-2] >= 4 * Y.shape[-1] else None
    Q, R = lapack.qr(Y, name) if factors is None else factors
    return Q, R / scale


def column_scale(Y: Tensor, name: str) -> Tensor:
    """Powers of two (..., 1, p) that bring every column of Y near one: exact, and its span is the same."""
    peak = magnitude(Y, (-2,))
    require_finite(peak, name)
    return unit_scale(peak)


def _cholesky_qr2(Y: Tensor, name: str = "the columns") -> tuple[Tensor, Tensor] | None:
    """Two passes of Cholesky QR, or None when the first pass is too far from orthonormal to be repaired by the second."""
    gram = Y.mT @ Y
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    if not bool((length > 0).all()):
        return None
    try:
        L = lapack.cholesky(gram / (length[..., :, None] * length[..., None, :]), name)
        if L is None:
            return None
        R = L.mT * length[..., None, :]
        Q = lapack.divide_upper(Y, R, name)
        gram = Q.mT @ Q
        excess = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        if not bool((torch.linalg.matrix_norm(excess) < 0.1).all()):  # False for NaN as well
            return None
        L = lapack.cholesky(gram, name)
        return None if L is None else (lapack.divide_upper(Q, L.mT, name), L.mT @ R)
    except DecompositionError:
        return None

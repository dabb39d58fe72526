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

    CholeskyQR2 is two Gram products and two triangular solves, one each where the columns are nearly orthogonal already:
    half the time of Householder there and the same elsewhere on CPUs, far less on GPUs. It squares the condition number,
    so columns are scaled to unit length first and its answer is taken only if the first pass already came out nearly
    orthonormal; otherwise Householder, which is safe for any Y.
    """
    scale = column_scale(Y, name)
    Y = Y * scale
    factors = _cholesky_qr2(Y, name) if Y.shape[-2] >= 4 * Y.shape[-1] else None
    Q, R = lapack.qr(Y, name) if factors is None else factors
    return Q, R / scale


def polished(U: Float[Tensor, "*batch d r"]) -> Float[Tensor, "*batch d r"]:
    """Orthonormal columns made so to the precision of float64, by one Newton-Schulz step."""
    U = U.double()
    return 1.5 * U - 0.5 * (U @ (U.mT @ U))


def column_scale(Y: Tensor, name: str) -> Tensor:
    """Powers of two (..., 1, p) that bring every column of Y near one: exact, and its span is the same."""
    peak = magnitude(Y, (-2,))
    require_finite(peak, name)
    return unit_scale(peak)


def _cholesky_qr2(Y: Tensor, name: str = "the columns") -> tuple[Tensor, Tensor] | None:
    """Cholesky QR, twice unless the columns were nearly orthogonal from the start; None when two passes are not enough.

    A pass leaves an error of rounding times the condition of its Gram matrix: where that is near the identity, as for a
    warm start and for the product with one, the first pass is as good as Householder.
    """
    Q, R = Y, None
    try:
        for _ in range(2):
            gram = Q.mT @ Q
            length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
            if not bool((length > 0).all()):
                return None
            gram = gram / (length[..., :, None] * length[..., None, :])
            excess = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            near = bool((torch.linalg.matrix_norm(excess) < 0.1).all())  # False for NaN as well
            L = lapack.cholesky(gram, name) if near or R is None else None
            if L is None:
                return None
            factor = L.mT * length[..., None, :]
            Q, R = lapack.divide_upper(Q, factor, name), factor if R is None else factor @ R
            if near:
                return Q, R
    except DecompositionError:
        pass
    return None

"""Thin QR: CholeskyQR2 where it is faster and safe, Householder elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg.shapes import Float


def orthonormal(
    Y: Float[Tensor, "*batch d p"],
) -> tuple[Float[Tensor, "*batch d p"], Float[Tensor, "*batch p p"]]:
    """Y = Q R with orthonormal Q (d x p, p <= d), also when Y is rank deficient.

    CholeskyQR2 is two Gram products and two triangular solves: half the time of Householder for tall Y on CPUs, far less
    on GPUs. It squares the condition number, so columns are scaled to unit length first and its answer is taken only if
    the first pass already came out nearly orthonormal; otherwise Householder, which is safe for any Y.
    """
    if Y.shape[-2] >= 4 * Y.shape[-1]:
        factors = _cholesky_qr2(Y)
        if factors is not None:
            return factors
    Q, R = torch.linalg.qr(Y)
    return Q, R


def _cholesky_qr2(Y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two passes of Cholesky QR, or None when the first pass is too far from orthonormal to be repaired by the second."""
    gram = Y.mT @ Y
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    L, info = torch.linalg.cholesky_ex(gram / (length[..., :, None] * length[..., None, :]))
    if bool(info.any()) or not bool(torch.isfinite(length).all()):
        return None
    R = L.mT * length[..., None, :]
    Q = torch.linalg.solve_triangular(R, Y, upper=True, left=False)
    gram = Q.mT @ Q
    excess = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    if not bool((torch.linalg.matrix_norm(excess) < 0.1).all()):  # False for NaN as well
        return None
    L2 = torch.linalg.cholesky(gram)
    return torch.linalg.solve_triangular(L2.mT, Q, upper=True, left=False), L2.mT @ R

"""Brand's online update of an exponential average kept in factored form, and the correction of its drift."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg.checks import require_positive
from rkfac.linalg.exact import symmetric_eigenpairs
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.shapes import Float


def online_update(
    low: LowRank, columns: Float[Tensor, "d n"], decay: float, rank: int | None = None, name: str = "the factor"
) -> LowRank:
    """Eigenpairs of decay * low + (1 - decay) * columns columns^T, exact before truncation to `rank`.

    O(d (r + n)^2), linear in d: the average itself is never formed. A tail decays along and stays exact. New columns
    that lie in the span of the old basis (numerically) add no basis vector, so U^T U = I survives.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must lie in [0, 1], got {decay}")
    if columns.ndim != 2 or columns.shape[0] != low.dim:
        raise ValueError(f"columns must have shape ({low.dim}, n), got {tuple(columns.shape)}")
    fill = low.fill
    W = (1 - decay) ** 0.5 * columns.to(low.U)
    P = low.U.mT @ W
    fresh = _complement(low.U, W - low.U @ P, torch.linalg.matrix_norm(W))
    coordinates = torch.cat([P, fresh.mT @ W])  # of W in the joint orthonormal basis [U | fresh]
    M = coordinates @ coordinates.mT
    M.diagonal()[: low.rank].add_(decay * (low.s - fill))
    values, rotation = symmetric_eigenpairs((M + M.mT) / 2, name)
    basis = torch.cat([low.U, fresh], dim=-1) @ rotation
    tail = None if low.tail is None else decay * low.tail
    updated = LowRank(basis, (values + decay * fill).clamp_min(0), tail)
    return updated if rank is None else updated.truncate(rank)


def _complement(U: Tensor, remainder: Tensor, size: Tensor) -> Tensor:
    """Orthonormal basis of what the new columns add to span(U): directions above rounding only, orthogonal to U."""
    room = U.shape[0] - U.shape[1]
    Q: Tensor
    Q, R = torch.linalg.qr(remainder)
    left, sigma, _ = torch.linalg.svd(R, full_matrices=False)
    rounding = 10 * U.shape[0] ** 0.5 * torch.finfo(U.dtype).eps * size
    Q = (Q @ left)[:, : min(int((sigma > rounding).sum()), room)]
    for _ in range(2):  # twice is enough: Q was orthogonal to U only up to rounding / sigma
        Q, _ = torch.linalg.qr(Q - U @ (U.mT @ Q))
    return Q


def correct(low: LowRank, X: Float[Tensor, "d d"], columns: Tensor, name: str = "the factor") -> LowRank:
    """Rayleigh-Ritz with the true average X on the sub-span of the chosen basis columns; O(d^2 |columns|).

    The span of U stays; the chosen vectors turn inside it and their values become those of X, so that errors which
    truncation piled up are removed. Afterwards the approximation need no longer lie below X.
    """
    require_positive(int(columns.numel()), "the number of columns to correct")
    chosen = low.U[:, columns]
    C = chosen.mT @ (X @ chosen)
    values, rotation = symmetric_eigenpairs((C + C.mT) / 2, name)
    U, s = low.U.clone(), low.s.clone()
    U[:, columns] = chosen @ rotation
    s[columns] = values.clamp_min(0)
    order = torch.argsort(s, descending=True)
    return LowRank(U[:, order], s[order], low.tail)

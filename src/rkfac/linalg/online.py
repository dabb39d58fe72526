"""Brand's online update of an exponential average kept in factored form, and the correction of its drift."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg import lapack
from rkfac.linalg.checks import require_finite, require_positive
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.operand import Operand, unscaled
from rkfac.linalg.orthonormal import orthonormal
from rkfac.linalg.scaling import unit_scale
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
    if rank is not None:
        require_positive(rank, "rank")
    # In units where columns and roots of eigenvalues are near one: their squares are what is decomposed.
    s, fill = low.s.double(), low.fill.double()
    peak = torch.cat([s.abs().sqrt(), fill[None].abs().sqrt(), columns.abs().amax(0).double()]).amax()
    require_finite(peak, name)
    unit = unit_scale(peak.clamp(1e-150, 1e150).to(low.U.dtype))  # whose square float64 can hold
    square = unit.double().square()
    s, fill = decay * square * s, decay * square * fill
    W = (1 - decay) ** 0.5 * (columns.to(low.U) * unit)
    P = low.U.mT @ W
    fresh = _complement(low.U, W - low.U @ P, torch.linalg.matrix_norm(W), name)
    coordinates = torch.cat([P, fresh.mT @ W])  # of W in the joint orthonormal basis [U | fresh]
    M = coordinates @ coordinates.mT
    M.diagonal()[: low.rank].add_((s - fill).to(M.dtype))
    values, rotation = lapack.eigenpairs((M + M.mT) / 2, name)
    basis = torch.cat([low.U, fresh], dim=-1)
    # Rounding piles up over the updates: a Newton step to the nearest orthonormal basis, (3 I - B^T B) / 2, undoes it.
    excess = basis.mT @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    basis = basis @ (rotation - excess @ rotation / 2)
    updated = LowRank(basis, (values + fill).clamp_min(0), None if low.tail is None else fill)
    return unscaled(updated if rank is None else updated.truncate(rank), square, name, low.s.dtype)


def _complement(U: Tensor, remainder: Tensor, size: Tensor, name: str) -> Tensor:
    """Orthonormal basis of what the new columns add to span(U): directions above rounding only, orthogonal to U."""
    room = U.shape[0] - U.shape[1]
    thin = remainder.shape[1] <= remainder.shape[0]
    Q, R = orthonormal(remainder, name) if thin else lapack.qr(remainder, name)
    left, sigma = lapack.left_singular(R, name)
    rounding = 10 * U.shape[0] ** 0.5 * torch.finfo(U.dtype).eps * size
    Q = (Q @ left)[:, : min(int((sigma > rounding).sum()), room)]
    for _ in range(2):  # twice is enough: Q was orthogonal to U only up to rounding / sigma
        Q, _ = orthonormal(Q - U @ (U.mT @ Q), name)
    return Q


def correct(low: LowRank, X: Float[Tensor, "d d"], columns: Tensor, name: str = "the factor") -> LowRank:
    """Rayleigh-Ritz with the true average X on the sub-span of the chosen basis columns; O(d^2 |columns|).

    The span of U stays; the chosen vectors turn inside it and their values become those of X, so that errors which
    truncation piled up are removed. Afterwards the approximation need no longer lie below X.
    """
    require_positive(int(columns.numel()), "the number of columns to correct")
    operand = Operand.of(X, 0.0, name)
    if X.shape != (low.dim, low.dim):
        raise ValueError(
            f"{name} has shape {tuple(X.shape)}, but its decomposition is of a {low.dim} x {low.dim} matrix"
        )
    chosen = low.U[:, columns].to(X.dtype)
    values, rotation = lapack.eigenpairs(operand.projection(chosen, operand @ chosen), name)
    corrected = operand.unscaled(LowRank(chosen @ rotation, values.clamp_min(0)))
    U, s = low.U.clone(), low.s.clone()
    U[:, columns] = corrected.U.to(U.dtype)
    s[columns] = corrected.s.to(s.dtype)
    order = torch.argsort(s, descending=True)
    return LowRank(U[:, order], s[order], low.tail)

"""Randomized decompositions of a symmetric PSD matrix: RSVD (V side), SREVD and Nystrom on one range finder.

All three cost `power_iterations + 1` products with X (2 d^2 p flops each, p = rank + oversampling) plus O(d p^2).
For one basis Q their eigenvalues are ordered SREVD <= RSVD <= Nystrom <= exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rkfac.linalg import lapack
from rkfac.linalg.checks import DecompositionError, require_positive, require_square, require_tail
from rkfac.linalg.exact import eigh
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.operand import Operand
from rkfac.linalg.orthonormal import column_scale, orthonormal
from rkfac.linalg.shapes import Float

Extraction = Callable[[Operand, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def rsvd(
    X: Float[Tensor, "*batch d d"],
    rank: int,
    oversampling: int = 10,
    power_iterations: int = 4,
    *,
    start: Float[Tensor, "*batch d k"] | None = None,
    tail: str = "zero",
    generator: torch.Generator | None = None,
    name: str = "the matrix",
    shift: float = 0.0,
    keep_start: bool = False,
) -> LowRank:
    """Randomized SVD, V side (paper's Algorithm 2): X ~ V diag(sigma) V^T from B = Q^T X = W diag(sigma) V^T.

    `power_iterations` is how often the paper's line 4 multiplies by X; every product is re-orthonormalised. V comes from
    a p x p problem. `start` (an earlier basis) warm-starts the sketch, of whose columns at least one in twenty stays fresh,
    for otherwise new directions were never found; `generator` makes it reproducible. `shift` decomposes X + shift I.
    With `keep_start` the power iterations are spent on the fresh columns alone: enough for a start that was made by them,
    and hardly more than one product with X in all.
    """
    return _decompose(
        _right_singular, X, rank, oversampling, power_iterations, start, tail, generator, name, shift, keep_start
    )


def srevd(
    X: Float[Tensor, "*batch d d"],
    rank: int,
    oversampling: int = 10,
    power_iterations: int = 4,
    *,
    start: Float[Tensor, "*batch d k"] | None = None,
    tail: str = "zero",
    generator: torch.Generator | None = None,
    name: str = "the matrix",
    shift: float = 0.0,
    keep_start: bool = False,
) -> LowRank:
    """Symmetric randomized EVD (paper's Algorithm 3): Rayleigh-Ritz, X ~ Q (Q^T X Q) Q^T; arguments as for `rsvd`."""
    return _decompose(
        _rayleigh_ritz, X, rank, oversampling, power_iterations, start, tail, generator, name, shift, keep_start
    )


def nystrom(
    X: Float[Tensor, "*batch d d"],
    rank: int,
    oversampling: int = 10,
    power_iterations: int = 1,
    *,
    start: Float[Tensor, "*batch d k"] | None = None,
    tail: str = "zero",
    generator: torch.Generator | None = None,
    name: str = "the matrix",
    shift: float = 0.0,
    keep_start: bool = False,
) -> LowRank:
    """Shifted Nystrom: X ~ (XQ)(Q^T X Q)^-1 (XQ)^T, PSD and never above X; arguments as for `rsvd`.

    Never less accurate than `rsvd` at the same number of products. With a warm start `power_iterations=0` is enough.
    """
    return _decompose(
        _shifted_nystrom, X, rank, oversampling, power_iterations, start, tail, generator, name, shift, keep_start
    )


def range_basis(
    operand: Operand,
    width: int,
    power_iterations: int,
    start: Tensor | None,
    generator: torch.Generator | None,
    keep_start: bool = False,
) -> Tensor:
    """Orthonormal basis of X^q [start | Gaussian], or of [start | X^q Gaussian] with `keep_start`; `width` columns.

    Re-orthonormalised after every product: else modes below eps^(1/q) of the largest are lost to rounding (0.016 in
    float32 at q = 4).
    """
    X, name = operand.X, operand.name
    fresh = width if start is None else width - start.shape[-1]
    # Drawn where the generator lives, so that one seed gives one sketch on every device.
    source = X.device if generator is None else generator.device
    basis = torch.randn(*X.shape[:-1], fresh, dtype=X.dtype, device=source, generator=generator).to(X.device)
    if start is not None:
        start = start.to(basis) * column_scale(start.to(basis), f"the start of {name}")
        if keep_start:
            start = start / torch.linalg.vector_norm(start, dim=-2, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
            for _ in range(power_iterations):
                basis = operand @ basis
                # What the start holds already would only be noise in the new columns. The span of both stays the same.
                basis = orthonormal(basis - start @ (start.mT @ basis), name)[0]
            power_iterations = 0
        basis = torch.cat([start, basis], dim=-1)
    if power_iterations == 0:
        return orthonormal(basis, name)[0]
    for _ in range(power_iterations):
        basis = orthonormal(operand @ basis, name)[0]
    return basis


def _decompose(
    extract: Extraction,
    X: Tensor,
    rank: int,
    oversampling: int,
    power_iterations: int,
    start: Tensor | None,
    tail: str,
    generator: torch.Generator | None,
    name: str,
    shift: float,
    keep_start: bool,
) -> LowRank:
    """Range finder, one more product, and the extraction the caller chose."""
    require_square(X, name)
    require_positive(rank, "rank")
    require_positive(oversampling, "oversampling", least=0)
    require_positive(power_iterations, "power_iterations", least=0)
    require_tail(tail)
    width = rank + oversampling
    if start is not None and start.shape[:-1] != X.shape[:-1]:
        raise ValueError(f"start has shape {tuple(start.shape)}, but {name} has shape {tuple(X.shape)}")
    if width >= X.shape[-1]:  # the sketch would be the whole space
        return eigh(X, rank, tail=tail, name=name, shift=shift)
    if start is not None:
        kept = min(rank, start.shape[-1], width - max(1, width // 20))
        start = start[..., :kept] if kept else None
    operand = Operand.of(X, shift, name)
    Q = range_basis(operand, width, power_iterations, start, generator, keep_start)
    Z = operand @ Q
    low = LowRank(*extract(operand, Q, Z, rank))
    return operand.unscaled(low.with_trace(operand.trace()) if tail == "trace" else low)


def _rayleigh_ritz(operand: Operand, Q: Tensor, Z: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Eigenpairs of P X P with P = Q Q^T."""
    theta, Y = lapack.eigenpairs(operand.projection(Q, Z), operand.name)
    return Q @ Y[..., :rank], theta[..., :rank].clamp_min(0)


def _right_singular(operand: Operand, Q: Tensor, Z: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Right singular pairs of B = Z^T, through Z = Q_Z R_Z so that the condition number is not squared."""
    operand.check(Q, Z)
    basis, R = orthonormal(Z, operand.name)
    left, sigma = lapack.left_singular(R, operand.name)
    return basis @ left[..., :rank], sigma[..., :rank]


def _shifted_nystrom(operand: Operand, Q: Tensor, Z: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Eigenpairs of Z C^-1 Z^T; a shift of rounding size keeps C positive definite and is subtracted again."""
    C, name = operand.projection(Q, Z), operand.name
    shift = Z.shape[-2] ** 0.5 * torch.finfo(Z.dtype).eps * torch.linalg.matrix_norm(Z)
    shift = shift.clamp_min(torch.finfo(Z.dtype).tiny ** 0.5)[..., None, None]
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    for _ in range(6 if C.dtype == torch.float32 else 12):  # up to about 1e-4 of its size in either precision
        L = lapack.cholesky(C + shift * eye, name)
        if L is not None:
            break
        shift = 10 * shift
    else:
        raise DecompositionError(f"Nystrom of {name} failed: it is not positive semi-definite beyond rounding")
    basis, R = orthonormal(Z + shift * Q, name)
    left, sigma = lapack.left_singular(lapack.divide_upper(R, L.mT, name), name)
    return basis @ left[..., :rank], (sigma.square() - shift[..., 0]).clamp_min(0)[..., :rank]

"""Every call of LAPACK, in one place: all its outputs are checked, and a failure is tried again in float64.

A solver can give up, and it can also return finite values beside NaN vectors (float32 gesdd on nearly flat spectra), so
nothing it returns is trusted unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rkfac.linalg.checks import DecompositionError

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigenpairs(C: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (descending) and eigenvectors of a symmetric matrix."""
    s, U = _checked(torch.linalg.eigh, [C], f"the eigendecomposition of {name}")
    return s.flip(-1), U.flip(-1)


def left_singular(R: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values (descending)."""
    left, sigma, _ = _checked(lambda R: torch.linalg.svd(R, full_matrices=False), [R], f"the small SVD inside {name}")
    return left, sigma


def qr(Y: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Householder's Y = Q R, thin."""
    Q, R = _checked(torch.linalg.qr, [Y], f"the QR factorisation inside {name}")
    return Q, R


def cholesky(C: Tensor, name: str) -> Tensor | None:
    """Lower factor of C, or None where C is not positive definite."""
    L, info = _checked(torch.linalg.cholesky_ex, [C], f"the Cholesky factorisation inside {name}")
    return None if bool(info.any()) else L


def definite_inverse(C: Tensor, name: str) -> Tensor | None:
    """C^-1, or None where C is not positive definite."""
    L = cholesky(C, name)
    if L is None:
        return None
    return _checked(lambda L: [torch.cholesky_inverse(L)], [L], f"the inverse of {name}")[0]


def divide_upper(B: Tensor, R: Tensor, name: str) -> Tensor:
    """B R^-1 for an upper triangular R."""

    def solve(B: Tensor, R: Tensor) -> list[Tensor]:
        return [torch.linalg.solve_triangular(R, B, upper=True, left=False)]

    return _checked(solve, [B, R], f"the triangular solve inside {name}")[0]


def _checked(routine: Callable[..., Sequence[Tensor]], matrices: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    """The routine's outputs, all of them finite, in the dtype of the matrices."""
    dtype = matrices[0].dtype
    for precision in dict.fromkeys((dtype, torch.float64)):
        try:
            outputs = routine(*(matrix.to(precision) for matrix in matrices))
        except LinAlgError:
            continue
        # A sum carries every NaN and Inf, in a sixth of the time of looking at each entry; matrices here are near unit size.
        if all(bool(torch.isfinite(output.sum())) for output in outputs):
            return [output.to(dtype) for output in outputs]
    size = " x ".join(str(n) for n in matrices[0].shape[-2:])
    raise DecompositionError(f"{what} ({size}) failed, also in float64")

"""What the routines refuse, in one place, so that every refusal says what is wrong and where.

A wrong argument (shape, dtype, count, a matrix that is not symmetric) is a ValueError; what only the values of a matrix
decide (NaN, Inf, an indefinite matrix, a solver that gives up) is a DecompositionError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class DecompositionError(ArithmeticError):
    """A matrix could not be decomposed, in its own precision nor in float64."""


def require_square(X: Tensor, name: str) -> None:
    """Refuse anything that is not a (batch of) square float32 or float64 matrices."""
    if X.ndim < 2 or X.shape[-1] != X.shape[-2] or X.shape[-1] == 0:
        raise ValueError(f"{name} must be a square matrix (or a batch of them), got shape {tuple(X.shape)}")
    if X.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} has dtype {X.dtype}; decompositions need float32 or float64, convert with X.float() first"
        )


def require_positive(value: object, argument: str, least: int = 1) -> None:
    """Refuse counts below the least sensible one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{argument} must be an integer >= {least}, got {value!r}")


def require_tail(tail: str) -> None:
    """Refuse unknown rules for the discarded spectrum."""
    if tail not in ("zero", "trace"):
        raise ValueError(f"tail must be 'zero' or 'trace', got {tail!r}")


def require_shift(shift: float, dtype: torch.dtype) -> None:
    """Refuse a multiple of the identity that the matrix's dtype cannot hold."""
    if not math.isfinite(shift) or abs(shift) > torch.finfo(dtype).max:
        raise ValueError(f"shift must be a finite number within the range of {dtype}, got {shift!r}")


def require_finite(summary: Tensor, name: str) -> None:
    """Refuse NaN and Inf, seen on the tensor itself or on anything they propagate to (a sum, a largest magnitude)."""
    if not bool(torch.isfinite(summary).all()):
        raise DecompositionError(f"{name} holds NaN or Inf")


def require_symmetric(C: Tensor, name: str, least: Tensor | float = 0.0) -> None:
    """Refuse asymmetry, seen on X itself or on a projection Q^T X Q of it; C is finite and of ordinary size.

    A projection shows it almost surely, at the price of a p x p comparison instead of a pass over d x d. One that leaves out
    the leading modes holds little but rounding: `least` is how large X itself is in C's units.
    """
    size = torch.linalg.matrix_norm(C).clamp_min(least)
    asymmetry = torch.linalg.matrix_norm(C - C.mT)
    if bool((asymmetry <= 1e4 * torch.finfo(C.dtype).eps * size).all()):
        return
    share = float((asymmetry / size.clamp_min(torch.finfo(C.dtype).tiny)).max())
    raise ValueError(
        f"{name} is not symmetric (asymmetry {share:.1e} of its size); pass (X + X.T) / 2 if that is meant"
    )

"""What the routines refuse, in one place, so that every refusal says what is wrong and where."""

from __future__ import annotations

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


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


def require_symmetric(C: Tensor, name: str) -> None:
    """Refuse NaN, Inf and asymmetry, seen on X itself or on a projection Q^T X Q of it.

    A projection shows both almost surely, at the price of a p x p comparison instead of a pass over d x d.
    """
    size = torch.linalg.matrix_norm(C)
    asymmetry = torch.linalg.matrix_norm(C - C.mT)
    tolerance = 1e4 * torch.finfo(C.dtype).eps
    if bool(((asymmetry <= tolerance * size) & torch.isfinite(size)).all()):
        return
    if not bool(torch.isfinite(size).all()):
        raise ValueError(f"{name} holds NaN or Inf")
    share = float((asymmetry / size.clamp_min(torch.finfo(C.dtype).tiny)).max())
    raise ValueError(
        f"{name} is not symmetric (asymmetry {share:.1e} of its size); pass (X + X.T) / 2 if that is meant"
    )

"""Matrices the linear-algebra tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def psd(
    d: int, rank: int | None = None, decay: float = 0.7, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    """Symmetric PSD with eigenvalues decay^i and a random eigenbasis; exactly rank-deficient if asked for."""
    g = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=g))
    values = decay ** torch.arange(d, dtype=torch.float64)
    if rank is not None:
        values[rank:] = 0
    X = (basis * values) @ basis.mT
    return ((X + X.mT) / 2).to(dtype)


def naive_solve(X: Tensor, V: Tensor, damping: float) -> Tensor:
    """(X + damping I)^-1 V by a dense solver."""
    return torch.linalg.solve(X + damping * torch.eye(X.shape[-1], dtype=X.dtype), V)

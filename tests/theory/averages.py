"""Running averages of rows whose covariance is known, and their eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Rows = Callable[[int, torch.Generator], Tensor]  # so many independent rows


def power_law(d: int, exponent: float) -> Tensor:
    return torch.arange(1, d + 1, dtype=torch.float64) ** -exponent


def gaussian(covariance: Tensor) -> Rows:
    """Rows with these eigenvalues of their covariance; the basis does not matter."""

    def rows(many: int, generator: torch.Generator) -> Tensor:
        return torch.randn(many, len(covariance), generator=generator, dtype=torch.float64) * covariance.sqrt()

    return rows


def weights(rho: float, n: int, updates: int | None = None) -> Tensor:
    """Of every row, newest batch first; of infinitely many those that matter, as they would be without the others."""
    batches = (math.ceil(math.log(1e-7) / math.log(rho)) if rho else 1) if updates is None else updates
    return ((1 - rho) * rho ** torch.arange(batches, dtype=torch.float64) / n).repeat_interleave(n)


def eigenvalues(rows: Rows, tau: Tensor, draws: int, shift: float = 0.0) -> Tensor:
    """Of sum_k tau_k x_k x_k^T + shift I in descending order, draw by draw."""
    found = []
    for draw in range(draws):
        x = rows(len(tau), torch.Generator().manual_seed(draw)) * tau.sqrt()[:, None]
        found.append(torch.linalg.eigvalsh(x.mT @ x).flip(0).clamp(min=0) + shift)
    return torch.stack(found)

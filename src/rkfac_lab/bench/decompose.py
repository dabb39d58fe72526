"""`rkfac bench decompose`: seconds and error of the ways to decompose one Kronecker factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from rkfac import linalg
from rkfac.linalg import LowRank
from rkfac_lab.bench.outcome import MEDIANS, outcome
from rkfac_lab.bench.timing import Spread, interleaved

DIMENSIONS = (513, 1153, 2305, 4609, 8193)
CAPTURED = "share of the trace of the best rank-r truncation that was captured"


@dataclass(frozen=True)
class Measurement:
    """One contestant at one size: seconds, and how much of the best truncation's trace it captured."""

    d: int
    method: str
    seconds: Spread
    captured: float | None
    relative_error: float | None


def factor_pair(d: int, batch: int = 256, rho: float = 0.95, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A factor as training makes it, and the same factor five statistics earlier (one refresh of the paper).

    An exponential average of 60 batches whose rows have a covariance that decays 1.5 orders of magnitude within 200
    modes and on as a power law, as the paper's Figure 1 shows; from batch to batch the covariance turns a little.
    """
    g = torch.Generator().manual_seed(seed)
    scale = (1 + torch.arange(d) / 12.0).pow(-0.6)  # standard deviations; variances decay with the power 1.2
    X, earlier = torch.zeros(d, d), torch.zeros(d, d)
    mixing = torch.randn(d, 64, generator=g) / d**0.5
    for step in range(60):
        rows = torch.randn(batch, d, generator=g) * scale
        rows += 0.05 * step / 60 * (rows @ mixing) @ mixing.mT
        X.mul_(rho).addmm_(rows.mT, rows, alpha=(1 - rho) / batch)
        if step == 54:
            earlier = X.clone()
    return X, earlier


def run(
    dimensions: Sequence[int] = DIMENSIONS,
    rank: int = 220,
    oversampling: int = 10,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every contestant at every size; one warm-up and `rounds` interleaved rounds each."""
    rows: list[Measurement] = []
    for d in dimensions:
        progress(f"d = {d}: building the factor")
        X, earlier = factor_pair(d)
        start = linalg.rsvd(earlier, min(rank, d), oversampling, 4, generator=torch.Generator().manual_seed(1)).U
        values = torch.linalg.eigvalsh(X).flip(-1).double()
        best, truth = float(values[:rank].sum()), float(values[0])
        contestants = _contestants(X, min(rank, d), oversampling, start)
        results = {}
        for name, contestant in contestants.items():
            progress(f"d = {d}: {name}")
            results[name] = contestant()
        progress(f"d = {d}: timing {rounds} rounds")
        seconds = interleaved(contestants, rounds if d <= 4609 else 1)
        for name, result in results.items():
            low = result if isinstance(result, LowRank) else None
            captured = None if low is None else float(low.truncate(rank).s.double().sum()) / best
            error = None if low is None else _spectral_error(X, low.truncate(rank)) / truth
            rows.append(Measurement(d, name, seconds[name], captured, error))
    return rows


def _contestants(X: Tensor, rank: int, oversampling: int, start: Tensor) -> dict[str, Callable[[], Any]]:
    from sklearn.utils.extmath import randomized_svd

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(2)

    def svd_lowrank() -> LowRank:
        _, s, V = torch.svd_lowrank(X, q=min(rank + oversampling, X.shape[0]), niter=4)
        return LowRank(V, s)

    def scikit_learn() -> LowRank:
        _, s, Vh = randomized_svd(X.numpy(), n_components=rank, n_oversamples=oversampling, n_iter=4, random_state=0)
        return LowRank(torch.from_numpy(Vh.T.copy()), torch.from_numpy(s))

    def cholesky_inverse() -> Tensor:
        damped = X.clone()
        damped.diagonal().add_(0.1)
        return torch.cholesky_inverse(torch.linalg.cholesky(damped))

    return {
        "eigh": lambda: linalg.eigh(X),
        "Cholesky inverse": cholesky_inverse,
        "svd_lowrank niter=4": svd_lowrank,
        "scikit-learn n_iter=4": scikit_learn,
        "rsvd q=4": lambda: linalg.rsvd(X, rank, oversampling, 4, generator=generator()),
        "srevd q=4": lambda: linalg.srevd(X, rank, oversampling, 4, generator=generator()),
        "nystrom q=4": lambda: linalg.nystrom(X, rank, oversampling, 4, generator=generator()),
        "nystrom warm q=1": lambda: linalg.nystrom(X, rank, oversampling, 1, start=start, generator=generator()),
        "nystrom warm q=0": lambda: linalg.nystrom(X, rank, oversampling, 0, start=start, generator=generator()),
    }


def _spectral_error(X: Tensor, low: LowRank, steps: int = 12) -> float:
    """||X - low||_2 by a few power steps with the difference."""
    v = torch.randn(X.shape[0], 1, generator=torch.Generator().manual_seed(3))
    size = 0.0
    for _ in range(steps):
        v = v / v.norm()
        v = X @ v - low @ v
        size = float(v.norm())
    return size


def table(rows: Sequence[Measurement]) -> Table:
    """Ratios at every size: how many times faster than eigh and than svd_lowrank, and what was captured."""
    shown = Table(title="Decomposing one K-factor (larger ratio: faster)")
    for heading in ("d", "method", "seconds", "x eigh", "x svd_lowrank", "captured", "error"):
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "method" else "right")
    for d in dict.fromkeys(row.d for row in rows):
        group = [row for row in rows if row.d == d]
        reference = {row.method: row.seconds.median for row in group}
        for row in group:
            shown.add_row(
                str(d),
                row.method,
                str(row.seconds),
                f"{reference['eigh'] / row.seconds.median:.1f}",
                f"{reference['svd_lowrank niter=4'] / row.seconds.median:.1f}",
                "-" if row.captured is None else f"{100 * row.captured:.2f} %",
                "-" if row.relative_error is None else f"{row.relative_error:.1e}",
            )
        shown.add_section()
    shown.caption = f"q: power iterations; captured: {CAPTURED}; error: ||X - low|| / ||X||; {MEDIANS}"
    return shown


def as_json(rows: Sequence[Measurement]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("decompose", rows, captured=CAPTURED)

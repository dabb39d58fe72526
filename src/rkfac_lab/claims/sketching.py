"""Sketches that multiply by a matrix equally often, how far they are from its exact eigenpairs, and what a step makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rkfac import linalg
from rkfac.linalg import LowRank
from rkfac_lab.claims.captured import OLD, YOUNG, Captured, apart, rounded, step_of

RSVD, U_SIDE, SREVD, NYSTROM = "RSVD", "RSVD, U side", "SREVD", "Nyström"
PUBLISHED_RSVD, PUBLISHED_SREVD = "RSVD as published", "SREVD as published"
DAMPING = 0.1  # of the largest eigenvalue, the paper's


# --- the sketches


def basis(
    X: Tensor, width: int, multiplications: int, generator: torch.Generator, *, orthonormalised: bool = True
) -> Tensor:
    """Orthonormal columns of X^multiplications times a Gaussian; `orthonormalised`: after every product, not at the end alone."""
    unit = X / torch.linalg.matrix_norm(X)  # powers of a small matrix would leave float32
    Q = torch.randn(X.shape[-1], width, dtype=X.dtype, generator=generator)
    for _ in range(multiplications):
        Q = unit @ Q
        if orthonormalised:
            Q = torch.linalg.qr(Q)[0]
    return torch.linalg.qr(Q)[0]


def u_side(X: Tensor, rank: int, oversampling: int, products: int, generator: torch.Generator) -> LowRank:
    """Q W and Sigma of Q^T X = W Sigma V^T: what PyTorch of 2022 returned as the V of a square matrix."""
    Q = basis(X, rank + oversampling, products - 1, generator)
    _, sigma, W = torch.linalg.svd(X @ Q, full_matrices=False)  # of the transpose, X being symmetric
    return LowRank(Q @ W.mT[:, :rank], sigma[:rank])


def plain_srevd(X: Tensor, rank: int, oversampling: int, products: int, generator: torch.Generator) -> LowRank:
    """SREVD whose power iterations are not orthonormalised between products."""
    Q = basis(X, rank + oversampling, products - 1, generator, orthonormalised=False)
    theta, Y = torch.linalg.eigh(Q.mT @ X @ Q)
    return LowRank((Q @ Y.flip(-1))[:, :rank], theta.flip(-1)[:rank].clamp_min(0))


def _by_products(method: Callable[..., LowRank]) -> Callable[..., LowRank]:
    """One of the library's sketches, which multiply once more than their power iterations."""

    def sketch(X: Tensor, rank: int, oversampling: int, products: int, generator: torch.Generator) -> LowRank:
        return method(X, rank, oversampling, products - 1, generator=generator)

    return sketch


METHODS: dict[str, Callable[..., LowRank]] = {
    RSVD: _by_products(linalg.rsvd),
    U_SIDE: u_side,
    SREVD: _by_products(linalg.srevd),
    NYSTROM: _by_products(linalg.nystrom),
}
PUBLISHED: dict[str, tuple[Callable[..., LowRank], int]] = {
    PUBLISHED_RSVD: (u_side, 10),
    PUBLISHED_SREVD: (plain_srevd, 5),
}


def sketched(
    method: Callable[..., LowRank], X: Tensor, exact: LowRank, rank: int, oversampling: int, products: int, seed: int
) -> LowRank:
    """In float32, as a training does it; the exact one where the sketch would be as wide as the matrix."""
    if rank + oversampling >= exact.dim:
        return exact.truncate(rank)
    low = method(X.float(), rank, oversampling, products, generator=torch.Generator().manual_seed(seed))
    return LowRank(low.U.double(), low.s.double())


# --- their errors


class FactorErrors(NamedTuple):
    """Of the kept eigenvalues (their sum is one), of the trace that the best rank-r basis holds, sine of the largest angle."""

    values: float
    lost: float
    angle: float


def factor_errors(low: LowRank, exact: LowRank) -> FactorErrors:
    """Of a sketch against all eigenpairs of its matrix."""
    best = exact.s[: low.rank]
    values = (low.s - best).abs().sum() / best.sum()  # of each alone it would be rounding where modes are nearly zero
    overlap = exact.U.mT @ torch.linalg.qr(low.U)[0]
    lost = 1 - (exact.s[:, None] * overlap.square()).sum() / best.sum()
    outside = overlap[low.rank :]
    sine = torch.linalg.matrix_norm(outside, 2) if len(outside) else torch.zeros(())
    return FactorErrors(rounded(float(values)), rounded(max(0.0, float(lost))), rounded(min(1.0, float(sine))))


def measured(
    layer: Captured, rank: int, oversampling: int, counts: Sequence[int], seeds: int
) -> Iterator[dict[str, Any]]:
    """One row a method and number of products: means over the sketches of several seeds."""
    exact = {"A": linalg.eigh(layer.A), "G": linalg.eigh(layer.G)}
    whole = step_of(exact["G"], exact["A"], layer.J, DAMPING)
    cut = step_of(exact["G"].truncate(rank), exact["A"].truncate(rank), layer.J, DAMPING)
    matrices = {"A": layer.A, "G": layer.G}
    wide = [side for side in matrices if exact[side].dim > rank + oversampling]
    tried = [(name, method, products) for name, method in METHODS.items() for products in counts]
    tried += [(name, method, products) for name, (method, products) in PUBLISHED.items()]
    for name, method, products in tried:
        factors: dict[str, list[FactorErrors]] = {side: [] for side in wide}
        against: dict[str, list[tuple[float, float]]] = {"truncated": [], "exact": []}
        for seed in range(seeds):
            low = {
                side: sketched(method, X, exact[side], rank, oversampling, products, seed)
                for side, X in matrices.items()
            }
            for side in wide:
                factors[side].append(factor_errors(low[side], exact[side]))
            step = step_of(low["G"], low["A"], layer.J, DAMPING)
            for truth, reference in (("truncated", cut), ("exact", whole)):
                against[truth].append(apart(step, reference))
        yield {
            "workload": layer.workload,
            "layer": layer.layer,
            "step": layer.step,
            "average": YOUNG if layer.remnant else OLD,
            "method": name,
            "products": products,
            "factors": {side: _means(FactorErrors._fields, found) for side, found in factors.items()},
            **{truth: _means(("relative", "cosine"), found) for truth, found in against.items()},
        }


def _means(names: Sequence[str], found: Sequence[Sequence[float]]) -> dict[str, float]:
    return {
        name: rounded(statistics.fmean(values)) for name, values in zip(names, zip(*found, strict=True), strict=True)
    }

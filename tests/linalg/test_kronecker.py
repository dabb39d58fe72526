from __future__ import annotations

import pytest
import torch

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import Diagonal, LowRank, Multipliers


def naive(rule: str, G: LowRank, A: LowRank, J: torch.Tensor, lg: float, la: float) -> torch.Tensor:
    """The two-sided solve through explicit dense matrices."""
    Gd, Ad = G.dense(), A.dense()
    eye_g, eye_a = torch.eye(len(Gd), dtype=J.dtype), torch.eye(len(Ad), dtype=J.dtype)
    if rule == "factored":
        return torch.linalg.inv(Gd + lg * eye_g) @ J @ torch.linalg.inv(Ad + la * eye_a)
    F = torch.kron(Ad, Gd) + lg * torch.eye(J.numel(), dtype=J.dtype)
    return torch.linalg.solve(F, J.mT.reshape(-1)).reshape(J.shape[1], J.shape[0]).mT


def multipliers(rule: str, G: LowRank, A: LowRank | Diagonal, lg: float, la: float) -> Multipliers:
    return linalg.factored(G, A, lg, la) if rule == "factored" else linalg.product(G, A, lg)


def solved(J: torch.Tensor, G: LowRank, A: LowRank | Diagonal, m: Multipliers, bias: bool) -> torch.Tensor:
    """S in float64, once its length and its product with J are known to be what the solution says."""
    solver = linalg.preconditioner(A, G, m)
    weight, vector = (J[..., :-1], J[..., -1]) if bias else (J, None)
    solution = solver.solve(weight, vector)
    S, close = solution.dense(weight, vector), 2e-3 if J.dtype == torch.float32 else 1e-9
    wide = J.double()
    assert solution.given == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=close)
    assert solution.scale * solution.square**0.5 == pytest.approx(float(torch.linalg.vector_norm(S)), rel=close)
    inner = solution.scale * solution.size * solution.inner()
    assert inner == pytest.approx(float((S * wide).sum()), rel=close)
    spent = solver.solve(weight.clone(), vector, spend=True)  # what happens to the copy is the solver's business
    torch.testing.assert_close(spent.dense(weight, vector), S, rtol=close, atol=close * float(S.abs().max()))
    return S


@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize("ranks", [(6, 9), (6, 4), (3, 9), (3, 4), (1, 1)])
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_block_case_equals_the_dense_solve(rule: str, ranks: tuple[int, int], tail: str, bias: bool) -> None:
    G, A = linalg.eigh(psd(6), ranks[0], tail=tail), linalg.eigh(psd(9, seed=1), ranks[1], tail=tail)
    J = torch.randn(6, 9, dtype=torch.float64)
    before = J.clone()
    got = solved(J, G, A, multipliers(rule, G, A, 0.02, 0.05), bias)
    torch.testing.assert_close(got, naive(rule, G, A, J, 0.02, 0.05), rtol=1e-9, atol=1e-9)
    assert torch.equal(J, before), "the gradient is not the solver's to change"


@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize("rank", [6, 3])
def test_a_diagonal_input_factor_equals_the_dense_solve(rule: str, rank: int) -> None:
    G, d = linalg.eigh(psd(6), rank, tail="trace"), torch.rand(9, dtype=torch.float64)
    J = torch.randn(6, 9, dtype=torch.float64)
    full = LowRank(torch.eye(9, dtype=torch.float64), d)
    got = solved(J, G, Diagonal(d), multipliers(rule, G, Diagonal(d), 0.02, 0.05), False)
    torch.testing.assert_close(got, naive(rule, G, full, J, 0.02, 0.05), rtol=1e-9, atol=1e-9)


def orthonormal_to_rounding(d: int, r: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, r, dtype=torch.float64, generator=generator))[0].float()


@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize("relative", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("kind", ["anywhere", "in the kept modes", "in the first mode"])
def test_float32_solves_agree_with_float64_down_to_tiny_dampings(rule: str, relative: float, kind: str) -> None:
    """A gradient inside the kept modes is what a batch smaller than the rank gives: there differences cancel."""
    d_G, d_A, r = 40, 60, 12
    decay = 10.0 ** -torch.linspace(0, 3, r)
    U_G, U_A = orthonormal_to_rounding(d_G, r, 0), orthonormal_to_rounding(d_A, r, 1)
    G, A = LowRank(U_G, decay), LowRank(U_A, decay)
    J = torch.randn(d_G, d_A)
    if kind != "anywhere":
        kept = r if kind == "in the kept modes" else 1
        J = U_G[:, :kept] @ torch.randn(kept, kept) @ U_A[:, :kept].mT
    l = relative**2 if rule == "product" else relative
    got = solved(J, G, A, multipliers(rule, G, A, l, relative), False)
    # The same matrices in float64, the orthogonal complement being that of the float32 basis itself.
    S = naive(
        rule, LowRank(_exactly(U_G), decay.double()), LowRank(_exactly(U_A), decay.double()), J.double(), l, relative
    )
    assert torch.linalg.norm(got - S) < 1e-3 * torch.linalg.norm(S)


def _exactly(U: torch.Tensor) -> torch.Tensor:
    W, _, V = torch.linalg.svd(U.double(), full_matrices=False)
    return W @ V


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gradient", [1e-18, 1e-9, 1.0, 1e12])
@pytest.mark.parametrize("curvature", [1e-36, 1e-18, 1.0, 1e24])
def test_any_scale_gives_the_same_relative_solution(dtype: torch.dtype, gradient: float, curvature: float) -> None:
    J = torch.randn(6, 9, dtype=torch.float64)
    plain = [linalg.eigh(psd(6), 3, tail="trace"), linalg.eigh(psd(9, seed=1), 4, tail="trace")]
    G, A = (LowRank(low.U.to(dtype), low.s * curvature, low.tail * curvature) for low in plain)
    m = linalg.factored(G, A, 0.1 * G.s[0], 0.1 * A.s[0])
    got = solved((J * gradient).to(dtype), G, A, m, True)
    expected = solved(J, *plain, linalg.factored(*plain, 0.1 * plain[0].s[0], 0.1 * plain[1].s[0]), True)
    expected = expected * (gradient / curvature**2)
    assert torch.linalg.norm(got - expected) <= 1e-5 * torch.linalg.norm(expected)


@pytest.mark.parametrize("rule", ["factored", "product"])
def test_a_batch_of_groups_equals_its_members(rule: str) -> None:
    groups = [(psd(4, seed=i), psd(6, seed=10 + i)) for i in range(3)]
    X_g, X_a = torch.stack([g for g, _ in groups]), torch.stack([a for _, a in groups])
    J = torch.randn(3, 4, 6, dtype=torch.float64)
    for ranks in ((4, 6), (4, 3), (2, 6), (2, 3)):
        G, A = linalg.eigh(X_g, ranks[0], tail="trace"), linalg.eigh(X_a, ranks[1], tail="trace")
        got = solved(J, G, A, multipliers(rule, G, A, 0.1, 0.2), True)
        parts = []
        for i in range(3):
            g, a = linalg.eigh(X_g[i], ranks[0], tail="trace"), linalg.eigh(X_a[i], ranks[1], tail="trace")
            parts.append(naive(rule, g, a, J[i], 0.1, 0.2))
        torch.testing.assert_close(got, torch.stack(parts), rtol=1e-8, atol=1e-8)


def test_infinite_damping_gives_the_gradient_direction() -> None:
    G, A = linalg.eigh(psd(6), 3), linalg.eigh(psd(9), 4)
    J = torch.randn(6, 9, dtype=torch.float64)
    S = solved(J, G, A, multipliers("factored", G, A, 1e7, 1e7), False) * 1e14
    torch.testing.assert_close(S, J, rtol=1e-6, atol=1e-6)


def test_relative_damping_scales_and_cancels_as_the_theory_says() -> None:
    J = torch.randn(5, 5, dtype=torch.float64)

    def scaled(g: float, a: float) -> torch.Tensor:
        G, A = linalg.eigh(g * psd(5), 3), linalg.eigh(a * psd(5, seed=2), 3)
        return solved(J, G, A, linalg.factored(G, A, 0.1 * G.s[0], 0.1 * A.s[0]), False)

    torch.testing.assert_close(scaled(3.0, 3.0), scaled(1.0, 1.0) / 9)
    torch.testing.assert_close(scaled(3.0, 1 / 3), scaled(1.0, 1.0))

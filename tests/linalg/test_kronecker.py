from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import Direction, LowRank, Spectrum


def naive(rule: str, G: LowRank, A: LowRank, J: torch.Tensor, lg: float, la: float) -> torch.Tensor:
    """The two-sided solve through explicit dense matrices."""
    Gd, Ad = G.dense(), A.dense()
    eye_g, eye_a = torch.eye(len(Gd), dtype=J.dtype), torch.eye(len(Ad), dtype=J.dtype)
    if rule == "factored":
        return torch.linalg.inv(Gd + lg * eye_g) @ J @ torch.linalg.inv(Ad + la * eye_a)
    F = torch.kron(Ad, Gd) + lg * torch.eye(J.numel(), dtype=J.dtype)
    return torch.linalg.solve(F, J.mT.reshape(-1)).reshape(J.shape[1], J.shape[0]).mT


def spectrum(rule: str, G: LowRank, A: LowRank, lg: float, la: float) -> Spectrum:
    return linalg.factored_spectrum(G, A, lg, la) if rule == "factored" else linalg.product_spectrum(G, A, lg)


def direction(J: torch.Tensor, G: LowRank, A: LowRank, s: Spectrum, bias: bool) -> Direction:
    return linalg.precondition(J[..., :-1], J[..., -1], G, A, s) if bias else linalg.precondition(J, None, G, A, s)


@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize("ranks", [(6, 9), (6, 4), (3, 9), (3, 4), (1, 1)])
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_block_case_equals_the_dense_solve(rule: str, ranks: tuple[int, int], tail: str, bias: bool) -> None:
    G, A = linalg.eigh(psd(6), ranks[0], tail=tail), linalg.eigh(psd(9, seed=1), ranks[1], tail=tail)
    J = torch.randn(6, 9, dtype=torch.float64)
    got = direction(J, G, A, spectrum(rule, G, A, 0.02, 0.05), bias)
    S = naive(rule, G, A, J, 0.02, 0.05)
    torch.testing.assert_close(got.dense(J), S, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.squared_norm, S.square().sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.inner, (S * J).sum(), rtol=1e-9, atol=1e-9)


@given(alpha=st.floats(-2, 2), factor=st.floats(0, 1))
def test_adding_in_place_equals_adding_the_dense_direction(alpha: float, factor: float) -> None:
    G, A = linalg.eigh(psd(5), 2), linalg.eigh(psd(7), 3)
    J = torch.randn(5, 7, dtype=torch.float64)
    got = direction(J, G, A, spectrum("factored", G, A, 0.1, 0.1), True)
    weight, bias = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    expected = torch.cat([weight, bias[:, None]], 1) + alpha * factor * got.dense(J)
    nu = torch.tensor(factor, dtype=torch.float64)
    got.add_weight(weight, J[:, :-1], nu, alpha)
    got.add_bias(bias, J[:, -1], nu, alpha)
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), expected)


@pytest.mark.parametrize("rule", ["factored", "product"])
def test_a_batch_of_groups_equals_its_members(rule: str) -> None:
    groups = [(psd(4, seed=i), psd(6, seed=10 + i)) for i in range(3)]
    X_g, X_a = torch.stack([g for g, _ in groups]), torch.stack([a for _, a in groups])
    J = torch.randn(3, 4, 6, dtype=torch.float64)
    for ranks in ((4, 6), (4, 3), (2, 6), (2, 3)):
        G, A = linalg.eigh(X_g, ranks[0], tail="trace"), linalg.eigh(X_a, ranks[1], tail="trace")
        got = direction(J, G, A, spectrum(rule, G, A, 0.1, 0.2), True)
        parts = []
        for i in range(3):
            g, a = linalg.eigh(X_g[i], ranks[0], tail="trace"), linalg.eigh(X_a[i], ranks[1], tail="trace")
            parts.append(naive(rule, g, a, J[i], 0.1, 0.2))
        torch.testing.assert_close(got.dense(J), torch.stack(parts), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(got.squared_norm, torch.stack(parts).square().sum())
        weight = torch.zeros(3, 4, 5, dtype=torch.float64)
        bias = torch.zeros(3, 4, dtype=torch.float64)
        got.add_weight(weight, J[..., :-1])
        got.add_bias(bias, J[..., -1])
        torch.testing.assert_close(torch.cat([weight, bias[..., None]], -1), torch.stack(parts), rtol=1e-8, atol=1e-8)


def test_infinite_damping_gives_the_gradient_direction() -> None:
    G, A = linalg.eigh(psd(6), 3), linalg.eigh(psd(9), 4)
    J = torch.randn(6, 9, dtype=torch.float64)
    S = direction(J, G, A, spectrum("factored", G, A, 1e7, 1e7), False).dense(J) * 1e14
    torch.testing.assert_close(S, J, rtol=1e-6, atol=1e-6)


def test_relative_damping_scales_and_cancels_as_the_theory_says() -> None:
    J = torch.randn(5, 5, dtype=torch.float64)

    def solved(g: float, a: float) -> torch.Tensor:
        G, A = linalg.eigh(g * psd(5), 3), linalg.eigh(a * psd(5, seed=2), 3)
        s = linalg.factored_spectrum(G, A, 0.1 * G.s[0], 0.1 * A.s[0])
        return linalg.precondition(J, None, G, A, s).dense(J)

    torch.testing.assert_close(solved(3.0, 3.0), solved(1.0, 1.0) / 9)
    torch.testing.assert_close(solved(3.0, 1 / 3), solved(1.0, 1.0))

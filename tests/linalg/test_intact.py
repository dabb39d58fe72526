"""Matrices kept as they are: damped inverses against dense ones, and eigenpairs for whoever asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rkfac import linalg
from rkfac.linalg import DecompositionError, Intact, lapack


def psd(d: int, dtype: torch.dtype = torch.float64, decay: float = 3.0) -> Tensor:
    """Symmetric with eigenvalues from one down to ten to the minus `decay`."""
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    X = (Q * torch.logspace(0, -decay, d, dtype=torch.float64)) @ Q.mT
    return ((X + X.mT) / 2).to(dtype)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e12])
@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_damped_inverse_is_the_dense_one(scale: float, shift: float, dtype: torch.dtype) -> None:
    X = psd(7, dtype)
    inverse, unit, condition = Intact(X, scale, shift * scale).damped_inverse(0.1 * scale)
    whole = scale * X.double() + (shift + 0.1) * scale * torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(
        inverse.double() * unit * scale,
        torch.linalg.inv(whole) * scale,
        rtol=1e-10 if dtype == torch.float64 else 1e-4,
        atol=1e-10 if dtype == torch.float64 else 1e-4,
    )
    assert float(inverse.diagonal().amax()) == pytest.approx(1.0)
    assert condition >= float(torch.linalg.cond(whole)) * (1 - 1e-6)


def test_what_has_no_inverse_is_refused_by_name() -> None:
    X = torch.diag(torch.tensor([1.0, -0.5]))
    with pytest.raises(DecompositionError, match="the factor is not positive definite"):
        Intact(X, 1.0, 0.0, "the factor").damped_inverse(0.1)
    for damping in (0.0, float("nan"), float("inf"), -1.0):
        with pytest.raises(DecompositionError, match="no damped inverse"):
            Intact(psd(3), 1.0, 0.0).damped_inverse(damping)
    broken = psd(3)
    broken[0, 0] = float("nan")
    with pytest.raises(DecompositionError):
        Intact(broken, 1.0, 0.0).damped_inverse(0.1)


def test_an_inverse_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cholesky_inverse", lambda L: torch.full_like(L, float("nan")))
    with pytest.raises(DecompositionError, match="inverse of the factor"):
        Intact(psd(3), 1.0, 0.0, "the factor").damped_inverse(0.1)


def test_eigenpairs_are_made_when_somebody_asks_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    X, made = psd(6), []
    genuine = lapack.eigenpairs
    monkeypatch.setattr(lapack, "eigenpairs", lambda *args: made.append(1) or genuine(*args))
    low = Intact(X, 4.0, 0.5)
    low.damped_inverse(0.1)
    low @ torch.ones(6, 1, dtype=torch.float64)
    assert (low.dim, low.rank, low.full, made) == (6, 6, True, [])
    expected = 4.0 * X + 0.5 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(low.dense(), expected)
    torch.testing.assert_close(low.s, torch.linalg.eigvalsh(expected).flip(0))
    torch.testing.assert_close(low.solve(X, 0.2), torch.linalg.solve(expected + 0.2 * torch.eye(6).double(), X))
    assert made == [1]


def test_products_permutations_and_distances() -> None:
    X, Y, V, order = psd(6), psd(6), torch.randn(6, 3, dtype=torch.float64), torch.randperm(6)
    low, other = Intact(X, 3.0, 0.5), Intact(Y, 2.0, 0.0)
    first, second = low.dense(), other.dense()
    torch.testing.assert_close(low @ V, first @ V)
    torch.testing.assert_close(low.permuted(order).dense(), first[order][:, order])
    low.damped_inverse(0.1)
    inverse, unit, _ = low.permuted(order).damped_inverse(0.1)
    mine, size, _ = low.damped_inverse(0.1)
    torch.testing.assert_close(inverse * unit, (mine * size)[order][:, order])
    expected = float((first - second).norm() / second.norm())
    assert low.distance(other) == pytest.approx(expected)
    assert low.distance(linalg.eigh(second)) == pytest.approx(expected)
    assert low.distance(low) == 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_inverses_are_the_two_sided_solve(bias: bool, damping: float, dtype: torch.dtype) -> None:
    """Where float32 would not do, as for a gradient inside the largest modes, the eigenpairs come in."""
    A, G = Intact(psd(9, dtype), 2.0, 0.0), Intact(psd(5, dtype), 0.5, 0.0)
    a, g = damping * 2.0, damping * 0.5
    deep = (G.U[:, :1] @ A.U[:, :1].mT).to(dtype)  # multiplied by the smallest number there is

    def told() -> linalg.Multipliers:
        return linalg.factored(G, A, g, a)

    solver = linalg.inverses(A, G, a, g, told)
    for J in (torch.randn(5, 9, dtype=dtype), deep):
        weight, vector = (J[:, :-1], J[:, -1]) if bias else (J, None)
        solution = solver.solve(weight, vector)
        S = solution.dense(weight, vector)
        dense = linalg.preconditioner(A, G, told()).solve(weight, vector).dense(weight, vector)
        close = 1e-3 if dtype == torch.float32 else 1e-6
        torch.testing.assert_close(S, dense, rtol=close, atol=close * float(dense.abs().max()))
        assert solution.given == pytest.approx(float(J.double().norm()), rel=1e-5)
        assert solution.scale * solution.square**0.5 == pytest.approx(float(S.norm()), rel=1e-3)


def test_multipliers_are_asked_for_only_where_digits_are_missing() -> None:
    A, G = Intact(psd(9, torch.float32), 1.0, 0.0), Intact(psd(5, torch.float32), 1.0, 0.0)

    def nobody() -> Any:
        raise AssertionError("nobody needs eigenpairs here")

    linalg.inverses(A, G, 0.5, 0.5, nobody).solve(torch.randn(5, 9), None)
    asked = []
    precise = linalg.inverses(A, G, 1e-7, 1e-7, lambda: asked.append(1) or linalg.factored(G, A, 1e-7, 1e-7))
    precise.solve((G.U[:, :1] @ A.U[:, :1].mT), None)
    assert asked == [1]

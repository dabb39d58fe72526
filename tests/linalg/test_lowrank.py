from __future__ import annotations

import dataclasses

import pytest
import torch

from linalg.matrices import naive_solve, psd
from rkfac import linalg
from rkfac.linalg import LowRank


@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("side", ["left", "right"])
def test_solve_equals_a_dense_solve_with_the_approximation(tail: str, rank: int, side: str) -> None:
    low = linalg.eigh(psd(12), rank, tail=tail)
    V = torch.randn(12, 4, dtype=torch.float64)
    if side == "right":
        V = V.mT.contiguous()
        expected = naive_solve(low.dense(), V.mT, 0.03).mT
    else:
        expected = naive_solve(low.dense(), V, 0.03)
    torch.testing.assert_close(low.solve(V, 0.03, side=side), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(low.solve(V, torch.tensor(0.03), side=side), expected, rtol=1e-6, atol=1e-6)


def test_solve_is_the_papers_equation_11_when_the_tail_is_zero() -> None:
    low = linalg.eigh(psd(10), 4)
    V, l = torch.randn(10, 3, dtype=torch.float64), 0.2
    equation_11 = low.U @ torch.diag(1 / (low.s + l) - 1 / l) @ low.U.mT @ V + V / l
    torch.testing.assert_close(low.solve(V, l), equation_11)


def test_solve_does_not_cancel_where_the_textbook_form_does() -> None:
    # s is far below the damping: 1/(s+l) - 1/l keeps no digit in float32, the stable form keeps them all.
    U = torch.eye(3)[:, :1]
    low = LowRank(U, torch.tensor([1e-9]))
    weight = (low.solve(torch.eye(3), 1.0) - torch.eye(3))[0, 0].double()
    assert weight == 0 or abs(weight + 1e-9) < 1e-7  # the sum itself is rounded to float32
    t = torch.tensor(0.0)
    stable = (t - low.s) / ((low.s + 1.0) * (t + 1.0))
    assert float(stable) == pytest.approx(-1e-9, rel=1e-6)


@pytest.mark.parametrize("tail", ["zero", "trace"])
def test_dense_matmul_trace_and_truncate_agree(tail: str) -> None:
    X = psd(9)
    full = linalg.eigh(X, tail=tail)
    torch.testing.assert_close(full.dense(), X)
    low = full.truncate(4)
    values, vectors = torch.linalg.eigh(X)
    best = (vectors[:, -4:] * values[-4:]) @ vectors[:, -4:].mT
    fill = (values[:5].sum() / 5) * (torch.eye(9, dtype=X.dtype) - vectors[:, -4:] @ vectors[:, -4:].mT)
    torch.testing.assert_close(low.dense(), best + fill if tail == "trace" else best)
    torch.testing.assert_close(low.trace(), low.dense().trace())
    V = torch.randn(9, 3, dtype=X.dtype)
    torch.testing.assert_close(low @ V, low.dense() @ V)
    if tail == "trace":
        torch.testing.assert_close(low.trace(), X.trace())
        torch.testing.assert_close(low.truncate(2).trace(), X.trace())
    assert low.truncate(7) is low


def test_it_is_frozen_and_refuses_bad_arguments() -> None:
    low = linalg.eigh(psd(5), 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        low.s = torch.zeros(2)  # type: ignore[misc]
    with pytest.raises(ValueError, match="side must be"):
        low.solve(torch.zeros(5, 1, dtype=torch.float64), 0.1, side="middle")
    with pytest.raises(ValueError, match="damping must be positive"):
        low.solve(torch.zeros(5, 1, dtype=torch.float64), 0.0)
    with pytest.raises(ValueError, match="5 x 5"):
        low.solve(torch.zeros(4, 1, dtype=torch.float64), 0.1)
    with pytest.raises(ValueError, match="rank must be"):
        low.truncate(0)

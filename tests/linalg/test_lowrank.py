from __future__ import annotations

import dataclasses

import pytest
import torch

from linalg.matrices import naive_solve, psd
from rkfac import linalg
from rkfac.linalg import Diagonal, LowRank


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


@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("rank", [4, 12])
def test_a_float64_spectrum_beside_a_float32_basis(tail: str, rank: int) -> None:
    exact = linalg.eigh(psd(12), rank, tail=tail)
    mixed = LowRank(exact.U.float(), exact.s, exact.tail)
    V = torch.randn(12, 3, dtype=torch.float64)
    for got, wanted in (
        (mixed.solve(V.float(), 0.03), exact.solve(V, 0.03)),
        (mixed.solve(V.float().mT, 0.03, side="right"), exact.solve(V.mT, 0.03, side="right")),
        (mixed @ V.float(), exact @ V),
        (mixed.dense(), exact.dense()),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    assert mixed.solve(V, 0.03).dtype == (mixed @ V).dtype == torch.float64
    for cut, wanted_cut in (
        (mixed.truncate(2), exact.truncate(2)),
        (mixed.with_trace(torch.tensor(5.0)), exact.with_trace(torch.tensor(5.0, dtype=torch.float64))),
    ):
        assert (cut.U.dtype, cut.s.dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(cut.s, wanted_cut.s)
        torch.testing.assert_close(cut.fill, wanted_cut.fill)
    torch.testing.assert_close(mixed.trace(), exact.trace())


def test_a_spectrum_that_float32_cannot_hold_is_solved_with() -> None:
    low = LowRank(torch.eye(4)[:, :2], torch.tensor([4e-60, 1e-60], dtype=torch.float64))
    V = torch.full((4, 1), 1e-30)
    expected = torch.tensor([0.2, 0.5, 1.0, 1.0])[:, None] * 1e30
    torch.testing.assert_close(low.solve(V, 1e-60), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(low @ torch.full((4, 1), 1e30), torch.tensor([[4e-30], [1e-30], [0.0], [0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("rank", [3, 9])
def test_shifted_is_the_scaled_and_shifted_matrix(dtype: torch.dtype, tail: str, rank: int) -> None:
    low, eye = linalg.eigh(psd(9, dtype=dtype), rank, tail=tail), torch.eye(9, dtype=dtype)
    for by, scale in ((0.7, 1.0), (0.0, 2.5), (torch.tensor(0.2), 0.5), (0.3, 0.0)):
        moved = low.shifted(by, scale)
        torch.testing.assert_close(moved.dense(), scale * low.dense() + by * eye)
        assert moved.U is low.U
        assert moved.s.dtype == torch.float64
    assert (low.shifted(0.0, 3.0).tail is None) == (tail == "zero")
    assert float(low.shifted(0.7).fill) == pytest.approx(float(low.fill) + 0.7)
    batch = linalg.eigh(torch.stack([psd(9), psd(9, seed=1)]), rank, tail=tail)
    moved = batch.shifted(torch.tensor([0.1, 0.4], dtype=torch.float64), 2.0)
    shifts = torch.tensor([0.1, 0.4], dtype=torch.float64)[:, None, None] * torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(moved.dense(), 2 * batch.dense() + shifts)
    with pytest.raises(ValueError, match="scale"):
        low.shifted(0.1, -1.0)


def test_a_small_shift_survives_beside_a_large_value() -> None:
    low = LowRank(torch.eye(3)[:, :1], torch.tensor([1.0])).shifted(1e-12)
    assert float(low.s[0] - 1.0) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e12])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("tails", [(False, False), (True, False), (True, True)])
def test_the_distance_equals_the_dense_one(
    dtype: torch.dtype, scale: float, batch: tuple[int, ...], tails: tuple[bool, bool]
) -> None:
    torch.manual_seed(0)
    lows = []
    for rank, tail in zip((3, 5), tails, strict=True):
        U = torch.linalg.qr(torch.randn(*batch, 8, rank, dtype=torch.float64))[0].to(dtype)
        s = torch.rand(*batch, rank, dtype=torch.float64).sort(descending=True)[0] + 1
        lows.append(LowRank(U, s * scale, torch.rand(batch, dtype=torch.float64) * scale if tail else None))
    X, Y = (LowRank(low.U.double(), low.s, low.tail).dense() for low in lows)
    precise = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert lows[0].distance(lows[1]) == pytest.approx(float((X - Y).norm() / Y.norm()), rel=precise)
    assert lows[1].distance(lows[0]) == pytest.approx(float((X - Y).norm() / X.norm()), rel=precise)
    assert lows[0].distance(lows[0]) < 1e-2


def test_the_distance_from_and_to_nothing() -> None:
    U = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64))[0]
    nothing, something = LowRank(U, U.new_zeros(2)), LowRank(U, U.new_ones(2))
    assert nothing.distance(nothing) == 0
    assert nothing.distance(something) == pytest.approx(1)
    assert something.distance(nothing) == float("inf")
    with pytest.raises(ValueError, match="compared"):
        something.distance(LowRank(torch.eye(4, 2, dtype=torch.float64), U.new_ones(2)))
    a, b = Diagonal(torch.tensor([1.0, 2.0, 4.0]).double()), Diagonal(torch.tensor([1.0, 2.0, 2.0]).double())
    assert a.distance(b) == pytest.approx(2 / 3)

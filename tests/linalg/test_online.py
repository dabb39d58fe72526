from __future__ import annotations

import pytest
import torch

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import LowRank


def test_without_truncation_it_is_the_dense_average() -> None:
    X, low = psd(40, rank=3), linalg.eigh(psd(40, rank=3), 3)
    for i in range(4):
        columns = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        X = 0.9 * X + 0.1 * columns @ columns.mT
        low = linalg.online_update(low, columns, 0.9)
        torch.testing.assert_close(low.dense(), X, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(low.U.mT @ low.U, torch.eye(low.rank, dtype=X.dtype), rtol=0, atol=1e-12)


def test_a_tail_decays_exactly_and_truncation_keeps_the_trace() -> None:
    low = linalg.eigh(psd(20, decay=0.9), 6, tail="trace")
    columns = torch.randn(20, 3, dtype=torch.float64)
    target = 0.95 * low.dense() + 0.05 * columns @ columns.mT
    updated = linalg.online_update(low, columns, 0.95)
    torch.testing.assert_close(updated.dense(), target, rtol=1e-10, atol=1e-12)
    cut = linalg.online_update(low, columns, 0.95, rank=6)
    assert cut.rank == 6
    torch.testing.assert_close(cut.trace(), target.trace())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_inside_the_old_span_keep_the_basis_orthonormal(dtype: torch.dtype) -> None:
    low = linalg.eigh(psd(50, rank=8, dtype=dtype), 8)
    columns = low.U @ torch.randn(8, 12, dtype=dtype)
    for _ in range(10):
        low = linalg.online_update(low, columns, 0.9)
    assert low.rank == 8
    torch.testing.assert_close(low.U.mT @ low.U, torch.eye(8, dtype=dtype), rtol=0, atol=1e-5)


def test_more_columns_than_room_fill_the_whole_space() -> None:
    low = linalg.eigh(psd(10), 6)
    columns = torch.randn(10, 9, dtype=torch.float64)
    updated = linalg.online_update(low, columns, 0.5)
    assert updated.full
    torch.testing.assert_close(updated.dense(), 0.5 * low.dense() + 0.5 * columns @ columns.mT)


def test_pure_brand_stays_below_the_average_with_the_known_error_recursion() -> None:
    X, low = (
        torch.zeros(30, 30, dtype=torch.float64),
        LowRank(torch.eye(30, dtype=torch.float64)[:, :4], torch.zeros(4, dtype=torch.float64)),
    )
    discarded = torch.zeros_like(X)
    for i in range(6):
        columns = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        X = 0.8 * X + 0.2 * columns @ columns.mT
        whole = linalg.online_update(low, columns, 0.8)
        low = whole.truncate(4)
        discarded = 0.8 * discarded + (whole.dense() - low.dense())
        torch.testing.assert_close(X - low.dense(), discarded, rtol=1e-9, atol=1e-12)
    assert float(torch.linalg.eigvalsh(X - low.dense()).min()) > -1e-12


def test_correction_with_all_columns_is_rayleigh_ritz_on_the_span() -> None:
    X = psd(25, decay=0.9)
    low = LowRank(torch.linalg.qr(torch.randn(25, 5, dtype=torch.float64))[0], torch.rand(5, dtype=torch.float64))
    corrected = linalg.correct(low, X, torch.arange(5))
    projected = low.U @ (low.U.mT @ X @ low.U) @ low.U.mT
    torch.testing.assert_close(corrected.dense(), projected)
    some = linalg.correct(low, X, torch.tensor([0, 3]))
    torch.testing.assert_close(some.U @ some.U.mT, low.U @ low.U.mT)
    assert (some.s.diff() <= 0).all()


def test_bad_arguments_are_named() -> None:
    low = linalg.eigh(psd(10), 3)
    with pytest.raises(ValueError, match="decay"):
        linalg.online_update(low, torch.zeros(10, 2, dtype=torch.float64), 1.5)
    with pytest.raises(ValueError, match=r"\(10, n\)"):
        linalg.online_update(low, torch.zeros(9, 2, dtype=torch.float64), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_pile_up_over_many_updates(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    span = torch.linalg.qr(torch.randn(100, 20, dtype=torch.float64, generator=g))[0].to(dtype)
    low = LowRank(span, torch.ones(20, dtype=dtype))
    worst = 0.0
    for _ in range(600 if dtype == torch.float32 else 100):
        low = linalg.online_update(low, span @ torch.randn(20, 8, dtype=dtype, generator=g), 0.95, rank=20)
        worst = max(worst, float((low.U.mT @ low.U - torch.eye(low.rank, dtype=dtype)).abs().max()))
    assert worst < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tail", ["zero", "trace"])
def test_nothing_new_or_nothing_at_all_keeps_it_sound(dtype: torch.dtype, tail: str) -> None:
    low = linalg.eigh(psd(30, rank=4, dtype=dtype), 6, tail=tail)
    nothing = LowRank(low.U, torch.zeros_like(low.s), None if low.tail is None else torch.zeros_like(low.tail))
    same = torch.randn(30, 1, dtype=dtype)
    for start in (low, nothing):
        for columns in (
            torch.zeros(30, 5, dtype=dtype),
            torch.zeros(30, 0, dtype=dtype),
            same.repeat(1, 5),
            torch.cat([low.U, low.U], dim=-1),
        ):
            for decay in (0.0, 0.9, 1.0):
                new = linalg.online_update(start, columns, decay)
                wanted = decay * start.dense() + (1 - decay) * columns @ columns.mT
                torch.testing.assert_close(new.dense(), wanted, rtol=1e-4, atol=1e-5)
                off = (new.U.mT @ new.U - torch.eye(new.rank, dtype=dtype)).abs().max()
                assert float(off) < (1e-5 if dtype == torch.float32 else 1e-12)


def test_what_is_not_finite_and_what_does_not_fit_are_told_apart() -> None:
    X, low = psd(10), linalg.eigh(psd(10), 3)
    columns = torch.full((10, 2), float("nan"), dtype=torch.float64)
    with pytest.raises(linalg.DecompositionError, match="layer 4 holds NaN or Inf"):
        linalg.online_update(low, columns, 0.5, name="layer 4")
    with pytest.raises(linalg.DecompositionError, match="layer 4 holds NaN or Inf"):
        linalg.correct(low, X * float("inf"), torch.tensor([0]), name="layer 4")
    with pytest.raises(ValueError, match="10 x 10"):
        linalg.correct(low, psd(9), torch.tensor([0]))
    X[0, 1] += 1.0
    with pytest.raises(ValueError, match="not symmetric"):
        linalg.correct(low, X, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correcting_modes_that_leave_out_the_leading_one_is_no_asymmetry(dtype: torch.dtype) -> None:
    """What is projected is then rounding of a matrix that is symmetric to the last bit."""
    generator = torch.Generator().manual_seed(0)
    columns = 30 + 0.1 * torch.randn(200, 16, generator=generator, dtype=torch.float64).to(dtype)
    for X in (columns @ columns.mT, torch.ones(200, 200, dtype=dtype)):
        X = torch.triu(X) + torch.triu(X, 1).mT
        low = linalg.eigh(X, 8)
        corrected = linalg.correct(low, X, torch.tensor([3, 5, 7]))
        assert torch.isfinite(corrected.U).all()
        torch.testing.assert_close(corrected.s[0], low.s[0])
        assert float(corrected.s[1:].amax()) <= 1.001 * float(low.s[1:].amax()) + 1e-3 * float(low.s[0])

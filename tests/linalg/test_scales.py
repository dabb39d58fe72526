"""The same relative result for a matrix of any size that float32 can hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import LowRank

EXPONENTS = [-119, -90, -61, 5, 62, 119]  # 2^-119 is 1.5e-36, 2^119 is 6.6e35


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _matrix() -> Tensor:
    """Eigenvalues from 8 down to 5e-3 in float32, the largest entry near one, with no digit below 2^-26.

    So that its multiples by powers of two down to 2^-119 are exact: float32 holds nothing below 2^-149.
    """
    X = 8 * psd(70, decay=0.9)
    return (torch.round(X * 2.0**26) / 2.0**26).float()


METHODS: dict[str, Callable[[Tensor], LowRank]] = {
    "rsvd": lambda X: linalg.rsvd(X, 9, 4, 3, tail="trace", generator=_seeded()),
    "rsvd, no power": lambda X: linalg.rsvd(X, 9, 4, 0, generator=_seeded()),
    "srevd": lambda X: linalg.srevd(X, 9, 4, 3, tail="trace", generator=_seeded()),
    "nystrom": lambda X: linalg.nystrom(X, 9, 4, 1, tail="trace", generator=_seeded()),
    "nystrom, wide": lambda X: linalg.nystrom(X, 30, 4, 1, generator=_seeded()),
    "eigh": lambda X: linalg.eigh(X, 9, tail="trace"),
    "adaptive": lambda X: linalg.adaptive(X, 0.1, first_rank=5, tail="trace", generator=_seeded()),
    "correct": lambda X: linalg.correct(
        LowRank(torch.eye(70)[:, :6], X.diagonal()[:6].sort(descending=True).values), X, torch.tensor([1, 4])
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_decompositions_do_not_depend_on_the_scale(method: str, exponent: int) -> None:
    X, scale = _matrix(), 2.0**exponent
    plain, low = METHODS[method](X), METHODS[method](X * scale)
    assert torch.equal(low.U, plain.U), "a power of two changes no digit"
    torch.testing.assert_close(low.s.double() / scale, plain.s.double(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(low.fill.double() / scale, plain.fill.double(), rtol=1e-6, atol=1e-8)
    assert float(plain.s[0]) > 0.5


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_shift_moves_with_the_scale(exponent: int) -> None:
    X, scale = _matrix(), 2.0**exponent
    for f in (linalg.rsvd, linalg.srevd, linalg.nystrom):
        plain = f(X, 9, 4, 1, shift=0.25, tail="trace", generator=_seeded())
        low = f(X * scale, 9, 4, 1, shift=0.25 * scale, tail="trace", generator=_seeded())
        assert torch.equal(low.U, plain.U)
        torch.testing.assert_close(low.s.double() / scale, plain.s.double())
        torch.testing.assert_close(low.fill.double() / scale, plain.fill.double())


def test_a_constant_matrix_at_the_upper_end() -> None:
    # Every product of it sums 100 entries of 1e36 with no cancellation, and its squares are far out of range.
    X = torch.full((100, 100), 1e36)
    for f in (linalg.rsvd, linalg.srevd, linalg.nystrom):
        low = f(X, 3, 3, 2, tail="trace")
        torch.testing.assert_close(low.s[0], torch.tensor(1e38))
        torch.testing.assert_close(low.dense() / 1e36, torch.ones(100, 100), rtol=0, atol=1e-4)
    torch.testing.assert_close(linalg.eigh(X).s[0], torch.tensor(1e38))
    with pytest.raises(linalg.DecompositionError, match="beyond the range"):
        linalg.rsvd(100 * X, 3, 3, 2)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_orthonormal_does_not_depend_on_the_scale(exponent: int) -> None:
    for p in (7, 40):
        Y = torch.round(torch.randn(70, p) * 2.0**20) / 2.0**20
        Q, R = linalg.orthonormal(Y)
        scaled_Q, scaled_R = linalg.orthonormal(Y * 2.0**exponent)
        assert torch.equal(Q, scaled_Q)
        torch.testing.assert_close(scaled_R.double() / 2.0**exponent, R.double())


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("spectrum", [torch.float32, torch.float64])
def test_online_updates_do_not_depend_on_the_scale(exponent: int, tail: str, spectrum: torch.dtype) -> None:
    scale = 4.0 ** (exponent // 2)  # of the average; columns have its root
    first = linalg.eigh(_matrix(), 6, tail=tail)
    columns = [torch.randn(70, 4, generator=_seeded()) for _ in range(3)]
    lows = []
    for size in (1.0, scale):
        tail_value = None if first.tail is None else first.tail.to(spectrum) * size
        low = LowRank(first.U, first.s.to(spectrum) * size, tail_value)
        for new in columns:
            low = linalg.online_update(low, new * size**0.5, 0.9, rank=8)
        lows.append(low)
    plain, low = lows
    assert low.s.dtype == spectrum
    assert torch.equal(low.U, plain.U)
    torch.testing.assert_close(low.s.double() / scale, plain.s.double(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(low.fill.double() / scale, plain.fill.double(), rtol=1e-6, atol=1e-8)


def test_columns_whose_squares_float32_cannot_hold() -> None:
    U, columns = torch.eye(30)[:, :3], torch.randn(30, 2)
    plain = linalg.online_update(LowRank(U, torch.ones(3)), columns, 0.9)
    for size in (1e30, 1e-30):
        low = linalg.online_update(LowRank(U, torch.ones(3).double() * size**2), columns * size, 0.9)
        torch.testing.assert_close(low.s / size**2, plain.s.double(), rtol=1e-5, atol=0)
    with pytest.raises(linalg.DecompositionError, match="beyond the range"):
        linalg.online_update(LowRank(U, torch.ones(3)), columns * 1e30, 0.9)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("rank", [5, 70])
@pytest.mark.parametrize("spectrum", [torch.float32, torch.float64])
def test_solves_and_products_do_not_depend_on_the_scale(
    exponent: int, tail: str, rank: int, spectrum: torch.dtype
) -> None:
    scale = 2.0**exponent
    plain = linalg.eigh(_matrix(), rank, tail=tail)
    low = LowRank(
        plain.U, plain.s.to(spectrum) * scale, None if plain.tail is None else plain.tail.to(spectrum) * scale
    )
    V = torch.randn(70, 3, generator=_seeded()) / 1024  # or the solution itself would be out of range
    for damping in (1.0, 1e-3):
        solved = low.solve(V, damping * scale)
        assert solved.dtype == torch.float32
        torch.testing.assert_close(solved.double() * scale, plain.solve(V, damping).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((low @ V).double() / scale, (plain @ V).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(low.dense().double() / scale, plain.dense().double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(low.trace().double() / scale, plain.trace().double())
    for cut, wanted in (
        (low.truncate(3), plain.truncate(3)),
        (low.with_trace(plain.trace() * (1.5 * scale)), plain.with_trace(1.5 * plain.trace())),
    ):
        assert cut.s.dtype == spectrum
        torch.testing.assert_close(cut.s.double() / scale, wanted.s.double(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(cut.fill.double() / scale, wanted.fill.double(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_error_bounds_do_not_depend_on_the_scale(exponent: int) -> None:
    X, scale = _matrix(), 2.0**exponent
    plain, low = (linalg.nystrom(Y, 5, 3, 1, generator=_seeded()) for Y in (X, X * scale))
    for bound in (linalg.trace_error, lambda Y, low: linalg.probe_error(Y, low, generator=_seeded())):
        torch.testing.assert_close(bound(X * scale, low) / scale, bound(X, plain), rtol=1e-4, atol=0)

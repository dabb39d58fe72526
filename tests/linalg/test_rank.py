from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import LowRank


@given(seed=st.integers(0, 1000), rank=st.integers(1, 12))
def test_both_error_bounds_hold(seed: int, rank: int) -> None:
    X = psd(30, decay=0.85, seed=seed)
    g = torch.Generator().manual_seed(seed)
    for f in (linalg.rsvd, linalg.srevd, linalg.nystrom):
        low = f(X, rank, 3, 1, generator=g)
        truth = float(torch.linalg.matrix_norm(X - low.dense(), 2))
        assert truth <= float(linalg.probe_error(X, low, probes=6, generator=g)) + 1e-12
    low = linalg.nystrom(X, rank, 3, 1, generator=g)
    assert float(torch.linalg.matrix_norm(X - low.dense(), 2)) <= float(linalg.trace_error(X, low)) + 1e-10


@given(seed=st.integers(0, 1000), damping=st.floats(1e-3, 1.0))
def test_the_inverse_error_bound_holds(seed: int, damping: float) -> None:
    X, eye = psd(20, seed=seed), torch.eye(20, dtype=torch.float64)
    low = linalg.nystrom(X, 4, 2, 1, generator=torch.Generator().manual_seed(seed))
    difference = torch.linalg.inv(X + damping * eye) - torch.linalg.inv(low.dense() + damping * eye)
    error = float(torch.linalg.matrix_norm(X - low.dense(), 2))
    assert damping * float(torch.linalg.matrix_norm(difference, 2)) <= linalg.inverse_error(error, damping) + 1e-9


def test_sufficient_rank_counts_modes_above_the_stated_share() -> None:
    s = torch.tensor([1.0, 0.5, 0.02, 0.009, 0.0])
    assert linalg.sufficient_rank(s, 0.09, share=0.1) == 3  # threshold 0.01
    assert linalg.sufficient_rank(s, 9.0, share=0.1) == 1  # never below one
    with pytest.raises(ValueError, match="share"):
        linalg.sufficient_rank(s, 0.1, share=1.5)


def spectrum(seed: int, kind: str, d: int) -> torch.Tensor:
    """Descending eigenvalues of size one: spread evenly, decaying, with a gap, or nearly flat."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(d, dtype=torch.float64, generator=g)
    decay = torch.exp(-0.6 * float(u[0]) * torch.arange(d, dtype=torch.float64))
    made = {"even": u, "decaying": decay, "gap": (u > 0.6) + 0.1 * u, "flat": 1 + 1e-3 * u}[kind]
    return made.sort(descending=True).values


@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["even", "decaying", "gap", "flat"]),
    d=st.integers(2, 40),
    damping=st.floats(1e-3, 1.0),
    share=st.sampled_from([0.05, 0.1, 0.3]),
)
def test_with_a_tail_no_discarded_mode_is_inverted_too_much_by_more_than_the_share(
    seed: int, kind: str, d: int, damping: float, share: float
) -> None:
    """(X_r + l)^-1 - (X + l)^-1 <= share / (t + l) in every direction; modes below the tail are damped more, not less."""
    s = spectrum(seed, kind, d)
    rank = linalg.sufficient_rank(s, damping, share, trace=float(s.sum()), d=d)
    assert rank <= linalg.sufficient_rank(s, damping, share)
    Q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).Q
    eye = torch.eye(d, dtype=torch.float64)

    def excess(rank: int) -> float:
        """Largest eigenvalue of the difference of inverses, in units of the inverse of tail and damping."""
        tail = float(s[rank:].mean())
        kept = Q[:, :rank]
        X_r = kept @ torch.diag(s[:rank]) @ kept.T + tail * (eye - kept @ kept.T)
        X = Q @ torch.diag(s) @ Q.T
        difference = torch.linalg.inv(X_r + damping * eye) - torch.linalg.inv(X + damping * eye)
        return float(torch.linalg.eigvalsh((difference + difference.T) / 2)[-1]) * (tail + damping)

    forced = rank == 1 and excess(0) <= share  # no mode is needed, and one is kept all the same
    if rank < d and not forced:
        assert excess(rank) <= share + 1e-9
    if rank > 1:
        assert excess(rank - 1) > share - 1e-9, "one mode less would have done"


def test_a_tail_makes_a_flat_spectrum_cheap_and_a_steep_one_no_dearer() -> None:
    flat, steep = torch.full((50,), 0.7, dtype=torch.float64), 0.5 ** torch.arange(50, dtype=torch.float64)
    assert linalg.sufficient_rank(flat, 0.01) == 50
    assert linalg.sufficient_rank(flat, 0.01, trace=35.0, d=50) == 1
    assert linalg.sufficient_rank(steep, 0.01, trace=float(steep.sum()), d=50) <= linalg.sufficient_rank(steep, 0.01)
    # A sketch knows the first values only, and the trace: the rest of a matrix of 500 is flat at 0.1.
    seen = torch.tensor([5.0, 3.0, 0.12, 0.11, 0.1], dtype=torch.float64)
    assert linalg.sufficient_rank(seen, 0.1, trace=8.0 + 498 * 0.1, d=500) == 2
    assert linalg.sufficient_rank(seen, 0.1) == 5


def test_adaptive_rank_knows_the_tail() -> None:
    X = psd(120, decay=0.6) + 0.05 * torch.eye(120, dtype=torch.float64)
    values = torch.linalg.eigvalsh(X).flip(-1)
    damping = 0.01
    without = linalg.adaptive(X, damping, first_rank=4, power_iterations=4)
    low = linalg.adaptive(X, damping, first_rank=4, power_iterations=4, tail="trace")
    needed = linalg.sufficient_rank(values, damping * float(values[0]), trace=float(X.trace()), d=120)
    assert abs(low.rank - needed) <= 2
    assert low.rank < 20 < 100 < without.rank
    assert float(low.tail) == pytest.approx(0.05, rel=0.2)


def test_adaptive_rank_grows_until_the_discarded_modes_are_small_and_shrinks_again() -> None:
    wide, narrow = psd(150, decay=0.97), psd(150, decay=0.8)
    damping = 0.1
    for X, start in ((wide, None), (narrow, linalg.eigh(wide, 80).U)):
        low = linalg.adaptive(X, damping, first_rank=4, start=start, power_iterations=4)
        values = torch.linalg.eigvalsh(X).flip(-1)
        needed = linalg.sufficient_rank(values, damping * float(values[0]))
        assert abs(low.rank - needed) <= 1
    assert linalg.adaptive(wide, damping, first_rank=4, max_rank=10).rank == 10
    absolute = linalg.adaptive(wide, 0.1 * float(torch.linalg.eigvalsh(wide)[-1]), relative=False, power_iterations=4)
    assert abs(absolute.rank - linalg.adaptive(wide, 0.1, power_iterations=4).rank) <= 1


class Counting:
    """A sketch that counts its calls and remembers its widths."""

    def __init__(self, method: Callable[..., LowRank]) -> None:
        self.method, self.widths = method, []

    def __call__(self, X: torch.Tensor, rank: int, oversampling: int, *rest: Any, **keywords: Any) -> LowRank:
        self.widths.append(rank + oversampling)
        return self.method(X, rank, oversampling, *rest, **keywords)


@pytest.mark.parametrize("method", [linalg.nystrom, linalg.rsvd, linalg.srevd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("oversampling", [0, 1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sketch_is_enough_where_nothing_changes(
    method: Callable[..., LowRank], oversampling: int, dtype: torch.dtype
) -> None:
    X, g = psd(150, decay=0.93, dtype=dtype), torch.Generator().manual_seed(0)
    needed = linalg.sufficient_rank(torch.linalg.eigvalsh(X).flip(-1), 0.1)
    keywords: dict[str, Any] = {"oversampling": oversampling, "power_iterations": 2, "generator": g}
    low = linalg.adaptive(X, 0.1, method=method, first_rank=64, **keywords)
    low = linalg.adaptive(X, 0.1, method=method, start=low.U, **keywords)  # where it settles
    ranks = [low.rank]
    for _ in range(12):
        counting = Counting(method)
        low = linalg.adaptive(X, 0.1, method=counting, start=low.U, **keywords)
        assert len(counting.widths) == 1, ranks
        ranks.append(low.rank)
    assert len(set(ranks)) == 1, ranks
    assert abs(ranks[0] - needed) <= 2
    assert 40 < needed < 80


def test_the_first_attempt_has_the_first_rank_and_growth_starts_from_what_is_known() -> None:
    X = psd(300, decay=0.96)
    counting = Counting(linalg.nystrom)
    low = linalg.adaptive(X, 0.1, method=counting, first_rank=8, power_iterations=4)
    assert counting.widths[0] == 18
    assert all(b >= 2 * a for a, b in itertools.pairwise(counting.widths))
    assert len(counting.widths) == 4
    assert counting.widths[2] < low.rank < counting.widths[3]
    for first, most in ((0, None), (4, 0)):
        with pytest.raises(ValueError, match="_rank must be"):
            linalg.adaptive(X, 0.1, first_rank=first, max_rank=most)


def test_the_oversampled_values_let_the_rank_follow_with_one_sketch() -> None:
    values = torch.full((100,), 1e-6, dtype=torch.float64)
    values[:20] = 1.0
    low = linalg.adaptive(torch.diag(values), 0.1, power_iterations=2)
    assert low.rank == 20
    for needed in (23, 30, 31, 12, 5):  # up by less than the oversampling, then down
        values[:needed], values[needed:] = 1.0, 1e-6
        counting = Counting(linalg.nystrom)
        low = linalg.adaptive(torch.diag(values), 0.1, method=counting, start=low.U, power_iterations=2)
        assert low.rank in (needed, needed + 1)  # one fewer is within the margin
        assert len(counting.widths) == 1
    values[:90] = 1.0
    low = linalg.adaptive(torch.diag(values), 0.1, start=low.U, power_iterations=2)
    assert low.rank == 90


def test_a_mode_at_the_threshold_does_not_make_the_rank_swing() -> None:
    values = torch.full((80,), 1e-6, dtype=torch.float64)
    values[:10] = 1.0
    threshold, start, ranks = 0.1 / 9, None, []
    for i in range(8):
        values[10] = threshold * (1.01 if i % 2 else 0.99)
        low = linalg.adaptive(torch.diag(values), 0.1, start=start, power_iterations=3)
        start = low.U
        ranks.append(low.rank)
    assert ranks == [10] + [11] * 7


def test_adaptive_with_a_shift_equals_the_shifted_matrix() -> None:
    X, eye = psd(60, decay=0.8), torch.eye(60, dtype=torch.float64)
    shifted, explicit = (
        linalg.adaptive(Y, 5.0, first_rank=4, tail="trace", generator=torch.Generator().manual_seed(0), shift=shift)
        for Y, shift in ((X, 0.2), (X + 0.2 * eye, 0.0))
    )
    assert shifted.rank == explicit.rank
    torch.testing.assert_close(shifted.dense(), explicit.dense())


def test_a_matrix_that_is_decomposed_exactly_is_cut_like_any_other() -> None:
    X = psd(120, decay=0.9)
    low = linalg.adaptive(X, 0.1, exact_if_cheaper=True, tail="trace")
    values = torch.linalg.eigvalsh(X).flip(-1)
    needed = linalg.sufficient_rank(values, 0.1 * float(values[0]), trace=float(X.trace()), d=120)
    assert low.rank == needed < 60
    torch.testing.assert_close(low.s, values[:needed])
    assert float(low.trace()) == pytest.approx(float(X.trace()))
    assert linalg.adaptive(X, 0.1, exact_if_cheaper=True, max_rank=7).rank == 7
    assert linalg.adaptive(torch.eye(5, dtype=torch.float64), 1e-3, exact_if_cheaper=True).rank == 5


@pytest.mark.parametrize("method", [linalg.nystrom, linalg.rsvd], ids=lambda f: f.__name__)
def test_a_kept_start_follows_a_drifting_matrix_nearly_as_well_as_full_power_iterations(
    method: Callable[..., LowRank],
) -> None:
    """A fifth of the matrix is replaced between refreshes: no smaller ranks, and at most a hundredth of the trace less."""
    d, results = 300, {}
    for keep in (False, True):
        X, low, g = psd(d, decay=0.97), None, torch.Generator().manual_seed(0)
        results[keep] = []
        for i in range(6):
            X = 0.8 * X + 0.2 * psd(d, decay=0.95, seed=10 + i)
            damping = float(X.diagonal().mean())
            start = None if low is None else low.U
            keywords: dict[str, Any] = {"method": method, "relative": False, "tail": "trace", "keep_start": keep}
            low = linalg.adaptive(X, damping, start=start, generator=g, **keywords)
            results[keep].append((low.rank, float(low.s.sum() / X.trace())))
    for (full_rank, full), (rank, captured) in zip(results[False], results[True], strict=True):
        assert rank >= full_rank
        assert captured >= full - 0.01

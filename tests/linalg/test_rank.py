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

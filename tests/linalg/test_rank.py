from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linalg.matrices import psd
from rkfac import linalg


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

"""Factors of columns (SKFAC): averaged slot by slot, inverted on the side of the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from curvature.test_online import DTYPES, moment_of, request
from rkfac.curvature.decompose import RSVD, Exact
from rkfac.curvature.factor import ColumnsFactor, DenseFactor, Start

D = 10


def factor(dtype: torch.dtype = torch.float64, identity: bool = False) -> ColumnsFactor:
    return ColumnsFactor((D,), Start(identity), torch.empty(0, dtype=dtype))


def woodbury(C: Tensor, V: Tensor, damping: float) -> Tensor:
    """The plain twin: (C C^T + l I)^-1 V = (V - C (l I + C^T C)^-1 C^T V) / l."""
    small = damping * torch.eye(C.shape[1], dtype=C.dtype) + C.mT @ C
    return (V - C @ torch.linalg.solve(small, C.mT @ V)) / damping


@pytest.mark.parametrize("n", [1, 4, D, 17])
@pytest.mark.parametrize("damping", [0.05, 3.0])
def test_one_batch_is_inverted_as_by_woodbury_and_as_a_dense_matrix(n: int, damping: float) -> None:
    rows, V = torch.randn(n, D, dtype=torch.float64), torch.randn(D, 3, dtype=torch.float64)
    kept = factor()
    kept.take(moment_of(rows, scale=0.7), 0.9)
    low = kept.refresh(request(strategy=Exact())).low
    C = 0.7**0.5 * rows.mT
    solved = low.solve(V, damping)
    torch.testing.assert_close(solved, woodbury(C, V, damping))
    dense = C @ C.mT + damping * torch.eye(D, dtype=torch.float64)
    torch.testing.assert_close(solved, torch.linalg.solve(dense, V))
    assert low.rank == min(n, D)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-18, 1e12], ids=["ordinary", "tiny", "huge"])
@pytest.mark.parametrize("identity", [True, False])
def test_columns_are_averaged_slot_by_slot_whatever_the_batch(dtype: torch.dtype, size: float, identity: bool) -> None:
    """Fewer rows leave the other slots to decay; more open new ones that held nothing."""
    kept, g = factor(dtype, identity), torch.Generator().manual_seed(0)
    C, weight, rest = torch.zeros(12, D, dtype=torch.float64), 1.0 * identity, 1.0 * identity
    for n, decay in ((5, 0.9), (3, 0.6), (12, 0.8), (5, 0.9), (1, 0.5)):
        rows = (torch.randn(n, D, generator=g, dtype=torch.float64) * size).to(dtype)
        kept.take(
            moment_of(rows[:1], rows[1:], scale=0.3, weights=(1.0, 2.0)) if n > 1 else moment_of(rows, scale=0.3), decay
        )
        new = torch.zeros_like(C)
        new[:n] = rows.double() * 0.3**0.5
        new[1:n] *= 2.0**0.5
        past = decay * weight
        weight = past + 1 - decay
        C, rest = (past * C + (1 - decay) * new) / weight, rest * past / weight
        X = C.mT @ C + rest * torch.eye(D, dtype=torch.float64)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert torch.linalg.norm(kept.dense() - X) <= tolerance * torch.linalg.norm(X)
        torch.testing.assert_close(kept.trace(), X.trace(), rtol=tolerance, atol=0)
        low = kept.refresh(request(strategy=Exact())).low
        assert torch.linalg.norm(low.dense().double() - X) <= tolerance * torch.linalg.norm(X)


def test_the_average_of_columns_is_not_the_average_of_factors() -> None:
    """It is smaller: what slots hold is unrelated, so that their averages cancel."""
    kept, dense = factor(), DenseFactor((D,), Start(False), torch.empty(0, dtype=torch.float64))
    g = torch.Generator().manual_seed(0)
    for step in range(30):
        rows = torch.randn(6, D, generator=g, dtype=torch.float64)
        kept.take(moment_of(rows), 0.9)
        dense.take(moment_of(rows), 0.9)
        if step == 0:
            torch.testing.assert_close(kept.dense(), dense.dense())
    assert float(kept.trace()) < 0.2 * float(dense.trace())


def test_groups_have_columns_of_their_own() -> None:
    kept = ColumnsFactor((2, D), Start(False), torch.empty(0, dtype=torch.float64))
    rows = torch.randn(2, 4, D, dtype=torch.float64)
    kept.take(moment_of(rows), 0.9)
    kept.take(moment_of(-rows[:, :3]), 0.9)
    for index in range(2):
        alone = factor()
        alone.take(moment_of(rows[index]), 0.9)
        alone.take(moment_of(-rows[index, :3]), 0.9)
        torch.testing.assert_close(kept.dense()[index], alone.dense())
    low = kept.refresh(request(strategy=Exact())).low
    torch.testing.assert_close(low.dense(), kept.dense())


def test_a_sketch_s_rank_cuts_the_modes_and_keeps_the_trace() -> None:
    kept = factor()
    kept.take(moment_of(torch.randn(6, D, dtype=torch.float64)), 0.9)
    low = kept.refresh(request(strategy=RSVD(rank=2))).low
    assert low.rank == 2
    torch.testing.assert_close(low.trace(), kept.trace())


def test_zeros_and_what_decayed_to_nothing_are_zero() -> None:
    kept, zeros = factor(), torch.zeros(3, D, dtype=torch.float64)
    kept.take(moment_of(zeros), 0.9)
    assert not bool(kept.refresh(request(strategy=Exact())).low.s.any())
    kept.take(moment_of(torch.ones(2, D, dtype=torch.float64)), 0.5)
    for _ in range(300):
        kept.take(moment_of(zeros), 0.5)
    assert not bool(kept.dense().any())
    kept.take(moment_of(torch.ones(1, D, dtype=torch.float64)), 0.0)
    torch.testing.assert_close(kept.dense(), torch.ones(D, D, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_factor_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    kept, other = factor(dtype), factor(dtype)
    rows = torch.randn(4, D, dtype=dtype)
    kept.take(moment_of(rows), 0.9)
    kept.adopt(kept.refresh(request(strategy=Exact())))
    other.load_state_dict(copy.deepcopy(kept.state_dict()))
    for one in (kept, other):
        one.take(moment_of(2 * rows[:3]), 0.9)
        one.adopt(one.refresh(request(strategy=Exact())))
    assert torch.equal(kept.low.U, other.low.U)
    assert torch.equal(kept.low.s, other.low.s)
    damaged = kept.state_dict()
    damaged["slots"] = 3
    with pytest.raises(ValueError, match="slots"):
        other.load_state_dict(damaged)

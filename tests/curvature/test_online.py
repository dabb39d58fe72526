"""An online factor against the dense average it stands for."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rkfac
from rkfac.curvature.decompose import RSVD, Exact, Request
from rkfac.curvature.factor import Brand, DenseFactor, OnlineFactor, Start
from rkfac.curvature.moment import RowsMoment

D = 24
DTYPES = [torch.float32, torch.float64]


def factor(modes: int, dtype: torch.dtype = torch.float64, start: Start | None = None, **method: Any) -> OnlineFactor:
    made = OnlineFactor((D,), Start(False) if start is None else start, torch.empty(0, dtype=dtype), Brand(**method))
    made.prepare(modes, lambda: torch.Generator().manual_seed(0), "the factor")
    return made


def moment_of(*parts: Tensor, scale: float = 1.0, weights: tuple[float, ...] = ()) -> RowsMoment:
    moment = RowsMoment()
    for index, rows in enumerate(parts):
        moment.add(rows, weights[index] if weights else 1.0)
    assert moment.settle([float(t) for t in moment.readings()])
    moment.scale = scale
    return moment


def request(**changes: Any) -> Request:
    settings: dict[str, Any] = {
        "strategy": RSVD(),
        "name": "the factor",
        "rank": 4,
        "oversampling": 2,
        "power_iterations": 1,
        "tail": "trace",
        "warm_start": True,
        "damping": 0.1,
        "relative": True,
        "generator": torch.Generator().manual_seed(0),
    }
    return Request(**{**settings, **changes})


def off_orthonormal(U: Tensor) -> float:
    return float((U.mT @ U - torch.eye(U.shape[1], dtype=U.dtype)).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-18, 1e12], ids=["ordinary", "tiny", "huge"])
@pytest.mark.parametrize("identity", [True, False])
def test_without_truncation_it_is_the_dense_average_over_twenty_steps(
    dtype: torch.dtype, size: float, identity: bool
) -> None:
    start = Start(identity)
    online, dense = factor(D, dtype, start), DenseFactor((D,), start, torch.empty(0, dtype=dtype))
    g = torch.Generator().manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for step in range(20):
        parts = [(torch.randn(n, D, generator=g, dtype=torch.float64) * size).to(dtype) for n in (3, 1 + step % 2)]
        decay = 0.9 if step % 3 else 0.6
        for one in (online, dense):
            one.take(moment_of(*parts, scale=0.3, weights=(1.0, 2.5)), decay)
        X = dense.dense()
        assert torch.linalg.norm(online.dense() - X) <= tolerance * torch.linalg.norm(X)
        torch.testing.assert_close(online.trace(), X.trace(), rtol=tolerance, atol=0)
        torch.testing.assert_close(online.spectrum(), dense.spectrum(), rtol=0, atol=tolerance * float(X.trace()))
        assert off_orthonormal(online.kept.U) < (1e-5 if dtype == torch.float32 else 1e-12)
    assert online.kept.rank == D


@pytest.mark.parametrize("dtype", DTYPES)
def test_cut_it_lies_below_the_average_by_the_decayed_sum_of_what_was_cut(dtype: torch.dtype) -> None:
    online, dense = factor(5, dtype), DenseFactor((D,), Start(False), torch.empty(0, dtype=torch.float64))
    g = torch.Generator().manual_seed(1)
    missing, weight = torch.zeros(D, D, dtype=torch.float64), 0.0
    for _ in range(12):
        rows = torch.randn(4, D, generator=g, dtype=torch.float64).to(dtype)
        keep = 0.8 * weight / (0.8 * weight + 0.2)
        weight = 0.8 * weight + 0.2
        target = keep * online.kept.dense().double() + (1 - keep) * rows.double().mT @ rows.double()
        online.take(moment_of(rows), 0.8)
        dense.take(moment_of(rows.double()), 0.8)
        low = online.kept.dense().double()
        missing = keep * missing + target - low
        X = dense.dense()
        tolerance = (1e-5 if dtype == torch.float32 else 1e-12) * float(X.trace())
        torch.testing.assert_close(X - low, missing, rtol=0, atol=tolerance)
        assert float(torch.linalg.eigvalsh(X - low).min()) > -tolerance
        torch.testing.assert_close(online.trace(), X.trace(), rtol=1e-6, atol=0)  # whatever was cut
        refreshed = online.refresh(request(rank=3))
        assert refreshed.low.rank == 3
        torch.testing.assert_close(refreshed.low.trace(), X.trace(), rtol=1e-6, atol=0)
    assert float(torch.linalg.norm(missing)) > 0.1 * float(torch.linalg.norm(X))  # something was cut indeed


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_inside_the_span_keep_the_modes_orthonormal(dtype: torch.dtype) -> None:
    online = factor(6, dtype)
    g = torch.Generator().manual_seed(2)
    span = torch.linalg.qr(torch.randn(D, 6, generator=g, dtype=torch.float64))[0].mT.to(dtype)
    for _ in range(40):
        online.take(moment_of(torch.randn(8, 6, generator=g, dtype=dtype) @ span), 0.9)
        assert off_orthonormal(online.kept.U) < (1e-5 if dtype == torch.float32 else 1e-12)
    assert float(online.refresh(request(rank=6)).low.tail) < 1e-6 * float(online.trace())


def test_ten_thousand_updates_past_convergence_do_not_drift() -> None:
    """In a process of its own: checking the shapes of so many calls takes minutes."""
    script, sources = Path(__file__).with_name("many_updates.py"), Path(rkfac.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    done = subprocess.run(
        [sys.executable, script, "10000"], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["updates"] == 10_000
    assert found["finite"]
    assert found["off_orthonormal"] < 1e-5
    assert found["off_average"] < 1e-4
    assert found["off_trace"] < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_may_change_by_thirty_decades_on_the_way(dtype: torch.dtype) -> None:
    online = factor(6, dtype)
    g = torch.Generator().manual_seed(4)
    for size in (1e12, 1e-18, 1.0, 0.0, 1e-18, 1e12):
        rows = torch.randn(3, D, generator=g, dtype=dtype) * size
        online.take(moment_of(rows, scale=0.5), 0.0 if size == 1.0 else 0.5)
        low = online.refresh(request()).low
        assert bool(torch.isfinite(low.U).all())
        assert bool(torch.isfinite(low.s).all())
        assert off_orthonormal(low.U) < 1e-5
    assert float(low.s[0]) > 1e23


def test_nothing_but_zeros_is_a_factor_of_zeros() -> None:
    online = factor(6)
    online.take(moment_of(torch.zeros(3, D, dtype=torch.float64)), 0.9)
    low = online.refresh(request()).low
    assert low.rank == 1
    assert not bool(low.s.any())
    assert float(online.trace()) == 0
    online.take(moment_of(torch.ones(1, D, dtype=torch.float64)), 0.0)
    torch.testing.assert_close(online.dense(), torch.ones(D, D, dtype=torch.float64))


def test_averages_that_decayed_to_nothing_are_zero() -> None:
    online = factor(6)
    online.take(moment_of(torch.ones(1, D, dtype=torch.float64)), 0.5)
    for _ in range(500):
        online.take(moment_of(torch.zeros(1, D, dtype=torch.float64)), 0.5)
    assert not bool(online.kept.s.any())


def test_more_rows_than_there_is_room_for_are_taken_in_pieces() -> None:
    wide = OnlineFactor((300,), Start(False), torch.empty(0, dtype=torch.float64))
    wide.prepare(250, torch.Generator, "the factor")
    rows = torch.randn(900, 300, dtype=torch.float64)
    wide.take(moment_of(rows), 0.9)
    assert wide.kept.rank == 250
    assert off_orthonormal(wide.kept.U) < 1e-12
    X = rows.mT @ rows
    torch.testing.assert_close(wide.trace(), X.trace())
    assert float(torch.linalg.eigvalsh(X - wide.kept.dense()).min()) > -1e-9 * float(X.trace())


# --- the variants


@pytest.mark.parametrize("sketched", [False, True])
def test_an_overwrite_is_the_decomposition_of_the_average(sketched: bool) -> None:
    start = Start(True, sketched)
    online = factor(4, start=start, variant="b-r", overwrite_every=2)
    dense = DenseFactor((D,), start, torch.empty(0, dtype=torch.float64))
    g = torch.Generator().manual_seed(5)
    for refresh in range(4):
        for _ in range(3):
            rows = torch.randn(4, D, generator=g, dtype=torch.float64)
            online.take(moment_of(rows), 0.8)
            dense.take(moment_of(rows), 0.8)
        torch.testing.assert_close(online.dense(), dense.dense())
        ours = online.refresh(request(warm_start=False))
        theirs = dense.refresh(request(warm_start=False))
        online.adopt(ours)
        equal = torch.allclose(ours.low.dense(), theirs.low.dense(), rtol=1e-10, atol=1e-12)
        assert equal is (refresh % 2 == 0)
        if equal:  # and what follows is updated from there, without its identity
            identity = 0.8 ** (3 * (refresh + 1))
            expected = (ours.low.U * (ours.low.s - identity)) @ ours.low.U.mT
            torch.testing.assert_close(online.kept.dense(), expected)


def test_a_correction_of_all_modes_is_rayleigh_ritz_on_their_span() -> None:
    online = factor(5, variant="b-r-c", correct_every=3, correct_share=1.0)
    plain = factor(5, variant="b-r")
    g = torch.Generator().manual_seed(6)
    for step in range(1, 7):
        before = plain.kept.U
        rows = torch.randn(4, D, generator=g, dtype=torch.float64)
        for one in (online, plain):
            one.take(moment_of(rows), 0.8)
        if step == 3:  # until then nothing was corrected, so that both have the same span
            U, X = plain.kept.U, plain.dense()
            torch.testing.assert_close(online.kept.dense(), U @ (U.mT @ X @ U) @ U.mT)
            assert not torch.allclose(online.kept.dense(), plain.kept.dense())
        elif step < 3:
            torch.testing.assert_close(online.kept.dense(), plain.kept.dense())
            assert before is not plain.kept.U


def test_a_fifth_of_the_modes_and_one_more_are_corrected_by_default() -> None:
    assert [Brand("b-r-c").corrected(modes) for modes in (1, 4, 10, 220)] == [1, 2, 3, 45]


# --- memory


@pytest.mark.parametrize("variant", ["b", "b-r-c"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_factor_goes_on_bit_for_bit(variant: str, dtype: torch.dtype) -> None:
    online, g = factor(5, dtype, variant=variant, correct_every=2), torch.Generator().manual_seed(7)
    rows = [torch.randn(4, D, generator=g, dtype=dtype) for _ in range(6)]
    for some in rows[:3]:
        online.take(moment_of(some), 0.8)
    online.adopt(online.refresh(request()))
    resumed = factor(5, dtype, variant=variant, correct_every=2)
    resumed.load_state_dict(copy.deepcopy(online.state_dict()))
    for one in (online, resumed):
        for some in rows[3:]:
            one.take(moment_of(some), 0.8)
        one.adopt(one.refresh(request()))
    for name in ("U", "s"):
        assert torch.equal(getattr(online.low, name), getattr(resumed.low, name))
        assert torch.equal(getattr(online.kept, name), getattr(resumed.kept, name))
    assert torch.equal(online.trace(), resumed.trace())


def test_pure_brand_keeps_no_matrix() -> None:
    online = factor(5)
    online.take(moment_of(torch.randn(4, D, dtype=torch.float64)), 0.8)
    assert online.nbytes <= (D * 5 + 5) * 8
    assert not online.square
    assert factor(5, variant="b-r").square


@pytest.mark.parametrize("strategy", [Exact(), RSVD(), RSVD(rank=2), RSVD(rank="auto", max_rank=3)])
def test_the_decomposition_says_how_many_modes_are_used(strategy: Any) -> None:
    online = factor(5)
    online.take(moment_of(torch.randn(8, D, dtype=torch.float64)), 0.8)
    used = online.refresh(request(strategy=strategy, damping=1e-6)).low.rank
    assert used == {Exact(): 5, RSVD(): 4, RSVD(rank=2): 2}.get(strategy, 3)

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.extmath import randomized_svd

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import DecompositionError, LowRank, orthonormal, sketch
from rkfac.linalg.operand import Operand

SKETCHES: dict[str, Callable[..., LowRank]] = {"rsvd": linalg.rsvd, "srevd": linalg.srevd, "nystrom": linalg.nystrom}
ALL = {**SKETCHES, "eigh": lambda X, rank, *_, **kw: linalg.eigh(X, rank, tail=kw.get("tail", "zero"))}


def unchecked(f: Callable[..., LowRank]) -> Callable[..., LowRank]:
    """The routine as users meet it: while tests run, jaxtyping would refuse a wrong shape one call earlier."""
    return getattr(f, "__wrapped__", f)


def naive(method: str, X: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
    """The approximation each method stands for, by dense brute force on the same basis."""
    P = Q @ Q.mT
    if method == "srevd":
        return P @ X @ P
    if method == "rsvd":
        _, sigma, Vh = torch.linalg.svd(Q.mT @ X, full_matrices=True)
        V = Vh[: sigma.numel()].mT
        return (V * sigma) @ V.mT
    return X @ Q @ torch.linalg.pinv(Q.mT @ X @ Q) @ Q.mT @ X


@pytest.mark.parametrize("method", SKETCHES)
@pytest.mark.parametrize("q", [0, 1, 3])
def test_each_sketch_equals_its_naive_twin(method: str, q: int) -> None:
    X = psd(30)
    Q = sketch.range_basis(Operand.of(X, 0.0, "X"), 8, q, None, torch.Generator().manual_seed(3))
    low = SKETCHES[method](X, 8, 0, q, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(low.dense(), naive(method, X, Q), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("q", [1, 4])
def test_the_range_finder_spans_what_the_paper_multiplies(q: int) -> None:
    X, omega = psd(20, decay=0.9), torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    naive_range = torch.linalg.qr(torch.linalg.matrix_power(X, q) @ omega)[0]
    Q = sketch.range_basis(Operand.of(X, 0.0, "X"), 5, q, None, torch.Generator().manual_seed(2))
    torch.testing.assert_close(Q @ Q.mT, naive_range @ naive_range.mT, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("q", [0, 1, 3])
def test_a_kept_start_is_joined_by_fresh_columns_that_alone_were_multiplied(q: int) -> None:
    X, g = psd(40, decay=0.9), torch.Generator().manual_seed(2)
    start = torch.linalg.qr(torch.randn(40, 4, dtype=torch.float64, generator=g))[0]
    omega = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    joined = torch.cat([start, torch.linalg.matrix_power(X, q) @ omega], dim=-1)
    # Each product leaves the start's share of the new columns behind, which a product of that share would not.
    deflate = torch.eye(40, dtype=torch.float64) - start @ start.mT
    if q > 1:
        joined = torch.cat([start, torch.linalg.matrix_power(deflate @ X, q) @ omega], dim=-1)
    naive_range = torch.linalg.qr(joined)[0]
    operand = Operand.of(X, 0.0, "X")
    Q = sketch.range_basis(operand, 7, q, start, torch.Generator().manual_seed(3), keep_start=True)
    torch.testing.assert_close(Q @ Q.mT, naive_range @ naive_range.mT, rtol=1e-8, atol=1e-10)


class Products(Operand):
    """An operand that counts the columns it is multiplied by."""

    columns = 0

    def __matmul__(self, Q: torch.Tensor) -> torch.Tensor:
        type(self).columns += Q.shape[-1]
        return super().__matmul__(Q)


def test_a_kept_start_costs_one_product_and_the_fresh_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    X = psd(100)
    monkeypatch.setattr(sketch, "Operand", Products)
    for keep, expected in ((False, 2 * 20), (True, 20 + 6)):
        monkeypatch.setattr(Products, "columns", 0)
        linalg.rsvd(X, 14, 6, 1, start=torch.eye(100, dtype=X.dtype)[:, :14], keep_start=keep)
        assert Products.columns == expected


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 7, 40])
@pytest.mark.parametrize("tail", ["zero", "trace"])
def test_rank_at_least_d_is_exact(method: str, dtype: torch.dtype, d: int, tail: str) -> None:
    X = psd(d, dtype=dtype)
    low = ALL[method](X, d + 3, 5, 2, tail=tail)
    assert low.rank == d
    torch.testing.assert_close(low.dense(), X)
    torch.testing.assert_close(low.s, torch.linalg.eigvalsh(X).flip(-1).clamp_min(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", SKETCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 6])
def test_rank_deficient_input_is_recovered_exactly(method: str, dtype: torch.dtype, rank: int) -> None:
    X = psd(60, rank=rank, dtype=dtype)  # rank 0 is the zero matrix
    low = SKETCHES[method](X, 8, 4, 1, tail="trace", generator=torch.Generator().manual_seed(0))
    scale = 5e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(low.dense(), X, rtol=0, atol=scale)
    torch.testing.assert_close(low.U.mT @ low.U, torch.eye(8, dtype=dtype), rtol=0, atol=1e-5)
    assert float(low.fill) <= scale


@given(seed=st.integers(0, 10_000), d=st.integers(5, 40), q=st.integers(0, 3), decay=st.floats(0.5, 0.99))
def test_eigenvalues_are_ordered_for_one_common_basis(seed: int, d: int, q: int, decay: float) -> None:
    X, p = psd(d, decay=decay, seed=seed), min(4, d - 1)
    values = [f(X, p, 0, q, generator=torch.Generator().manual_seed(seed)).s for f in SKETCHES.values()]
    by_name = dict(zip(SKETCHES, values, strict=True))
    top = torch.linalg.eigvalsh(X).flip(-1)[:p]
    slack = 1e-10
    assert (by_name["srevd"] <= by_name["rsvd"] + slack).all()
    assert (by_name["rsvd"] <= by_name["nystrom"] + slack).all()
    assert (by_name["nystrom"] <= top + slack).all()


@given(seed=st.integers(0, 10_000))
def test_errors_are_ordered_in_every_norm_the_theory_names(seed: int) -> None:
    X = psd(25, decay=0.9, seed=seed)
    error = {
        name: X - f(X, 6, 0, 1, generator=torch.Generator().manual_seed(seed)).dense() for name, f in SKETCHES.items()
    }
    for order in (2, "fro", "nuc"):
        size = {name: float(torch.linalg.matrix_norm(e, order)) for name, e in error.items()}
        assert size["nystrom"] <= size["rsvd"] + 1e-9
        assert size["nystrom"] <= size["srevd"] + 1e-9
    nuclear = {name: float(torch.linalg.matrix_norm(e, "nuc")) for name, e in error.items()}
    assert nuclear["rsvd"] <= nuclear["srevd"] + 1e-9
    assert float(torch.linalg.eigvalsh(error["nystrom"]).min()) >= -1e-9  # Nystrom never exceeds X


@pytest.mark.parametrize("method", SKETCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bases_are_orthonormal_and_values_descend(method: str, dtype: torch.dtype) -> None:
    low = SKETCHES[method](psd(200, decay=0.9, dtype=dtype), 30, 10, 4)
    torch.testing.assert_close(low.U.mT @ low.U, torch.eye(30, dtype=dtype), rtol=0, atol=2e-5)
    assert (low.s.diff() <= 0).all()


def test_float32_power_iterations_keep_small_modes() -> None:
    # Without re-orthonormalising, modes below 0.016 of the largest are lost at q = 4 in float32.
    X = psd(100, decay=0.75, dtype=torch.float32)
    exact_values = torch.linalg.eigvalsh(X.double()).flip(-1)[:30]
    low = linalg.rsvd(X, 30, 10, 4)
    torch.testing.assert_close(low.s.double(), exact_values, rtol=2e-2, atol=1e-6)
    assert float(exact_values[29]) < 1e-3


def test_the_same_generator_gives_the_same_bits_and_another_does_not() -> None:
    X = psd(50, decay=0.95)
    for f in SKETCHES.values():
        first, second, other = (f(X, 5, 3, 1, generator=torch.Generator().manual_seed(i)) for i in (7, 7, 8))
        assert torch.equal(first.U, second.U)
        assert torch.equal(first.s, second.s)
        assert not torch.equal(first.U, other.U)


@pytest.mark.parametrize("method", ALL)
def test_a_batch_equals_its_members(method: str) -> None:
    X = torch.stack([psd(12, seed=i, decay=0.6) for i in range(3)])
    low = ALL[method](X, 12, 0, 2, tail="trace")
    torch.testing.assert_close(low.dense(), X)
    low = ALL[method](X, 6, 4, 3, tail="trace")
    for i in range(3):
        alone = ALL[method](X[i], 6, 4, 3, tail="trace")
        torch.testing.assert_close(low.dense()[i], alone.dense(), rtol=0, atol=2e-3)
    V = torch.randn(3, 12, 2, dtype=X.dtype)
    torch.testing.assert_close(
        low.solve(V, 0.1),
        torch.stack([torch.linalg.solve(low.dense()[i] + 0.1 * torch.eye(12, dtype=X.dtype), V[i]) for i in range(3)]),
    )


def test_a_warm_start_on_an_unchanged_matrix_never_loses_trace() -> None:
    X = psd(120, decay=0.97)
    low = linalg.nystrom(X, 15, 5, 0, generator=torch.Generator().manual_seed(0))
    captured = [float(low.s.sum())]
    for i in range(8):
        low = linalg.nystrom(X, 15, 5, 0, start=low.U, generator=torch.Generator().manual_seed(i + 1))
        captured.append(float(low.s.sum()))
    assert all(b >= a - 1e-10 for a, b in itertools.pairwise(captured))
    assert captured[-1] > captured[0] + 1e-3


def test_a_warm_start_finds_directions_that_were_not_there_before() -> None:
    X = psd(80, rank=5)
    low = linalg.nystrom(X, 8, 4, 0)
    new = torch.linalg.qr(torch.randn(80, 1, dtype=torch.float64))[0]
    Y = X + 3.0 * new @ new.mT
    low = linalg.nystrom(Y, 8, 4, 0, start=low.U)
    torch.testing.assert_close(low.dense(), Y, rtol=0, atol=1e-9)


def test_rsvd_agrees_with_scikit_learn() -> None:
    X = psd(150, decay=0.9)
    _, sigma, _ = randomized_svd(X.numpy(), n_components=20, n_oversamples=10, n_iter=6, random_state=0)
    torch.testing.assert_close(linalg.rsvd(X, 20, 10, 8).s, torch.from_numpy(sigma), rtol=1e-6, atol=0)


def test_the_tail_preserves_the_trace() -> None:
    X = psd(50, decay=0.95)
    for f in SKETCHES.values():
        torch.testing.assert_close(f(X, 6, 3, 2, tail="trace").trace(), X.trace())


@pytest.mark.parametrize(
    "Y",
    [
        torch.randn(100, 7),
        torch.randn(100, 7, dtype=torch.float64) * torch.logspace(0, -12, 7, dtype=torch.float64),
        torch.randn(100, 1).expand(100, 7).contiguous(),  # rank one
        torch.zeros(100, 7),
        torch.randn(8, 7),
        torch.randn(2, 60, 5),
    ],
    ids=["plain", "badly scaled columns", "rank one", "zero", "nearly square", "batch"],
)
def test_orthonormal_factors_anything(Y: torch.Tensor) -> None:
    Q, R = orthonormal(Y)
    p = Y.shape[-1]
    eps = torch.finfo(Y.dtype).eps
    torch.testing.assert_close(Q.mT @ Q, torch.eye(p, dtype=Y.dtype).expand(*Y.shape[:-2], p, p), rtol=0, atol=50 * eps)
    torch.testing.assert_close(Q @ R, Y, rtol=1e-5, atol=100 * eps)
    assert torch.equal(R, R.triu())


def test_ill_conditioned_columns_take_the_householder_way() -> None:
    from rkfac.linalg.orthonormal import _cholesky_qr2

    Y = torch.randn(200, 1) + 1e-5 * torch.randn(200, 6)
    assert _cholesky_qr2(Y) is None
    Q, _ = orthonormal(Y)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(6), rtol=0, atol=1e-5)
    assert _cholesky_qr2(torch.randn(200, 6)) is not None


def _bad_inputs() -> dict[str, tuple[torch.Tensor, str]]:
    nan, inf, skew = psd(40), psd(40), psd(40)
    nan[3, 3] = float("nan")
    inf[7, 2] = float("inf")
    skew[0, 1] += 1.0
    return {
        "non-square": (torch.zeros(4, 5), "square matrix"),
        "vector": (torch.zeros(4), "square matrix"),
        "empty": (torch.zeros(0, 0), "square matrix"),
        "not symmetric": (skew, "not symmetric"),
        "NaN": (nan, "NaN or Inf"),
        "Inf": (inf, "NaN or Inf"),
        "half": (psd(40).half(), "float32 or float64"),
        "integer": (torch.eye(40, dtype=torch.int64), "float32 or float64"),
    }


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("case", _bad_inputs())
def test_bad_input_is_refused_by_what_and_where(method: str, case: str) -> None:
    X, message = _bad_inputs()[case]
    f = unchecked(linalg.eigh if method == "eigh" else SKETCHES[method])
    kind = DecompositionError if case in ("NaN", "Inf") else ValueError
    with pytest.raises(kind, match=message) as error:
        f(X, 5, name="layer 3, input factor")
    assert "layer 3, input factor" in str(error.value)


@pytest.mark.parametrize("method", SKETCHES)
def test_bad_arguments_are_named(method: str) -> None:
    X = psd(30)
    for keywords, argument in (
        ({"rank": 0}, "rank"),
        ({"rank": 3, "oversampling": -1}, "oversampling"),
        ({"rank": 3, "power_iterations": -1}, "power_iterations"),
        ({"rank": 3, "tail": "flat"}, "tail"),
        ({"rank": 3, "shift": float("inf")}, "shift"),
        ({"rank": 3, "start": torch.zeros(29, 3, dtype=X.dtype)}, "start"),
    ):
        with pytest.raises(ValueError, match=argument):
            unchecked(SKETCHES[method])(X, **keywords)


def test_an_indefinite_matrix_is_refused() -> None:
    X = torch.diag(torch.tensor([2.0, 1.0, -1.0] + [0.0] * 20, dtype=torch.float64))
    with pytest.raises(DecompositionError, match="positive semi-definite"):
        linalg.eigh(X)
    with pytest.raises(DecompositionError, match="layer 1"):
        linalg.nystrom(-psd(30), 4, name="layer 1")


@pytest.mark.parametrize("method", SKETCHES)
def test_a_finite_matrix_is_never_said_to_hold_nan(method: str) -> None:
    huge = (psd(40, dtype=torch.float64) * 1e25).float()
    assert not torch.isfinite(torch.linalg.matrix_norm(huge))
    torch.testing.assert_close(linalg.eigh(huge).s[0], torch.tensor(1e25))
    skew = huge.clone()
    skew[0, 1] += 1e25
    hollow = torch.zeros(40, 40)
    hollow[0, 1] = hollow[1, 0] = 1e36
    for f in (SKETCHES[method], linalg.eigh):
        with pytest.raises(ValueError, match="not symmetric"):
            f(skew, 5)
        with pytest.raises(ValueError, match="not symmetric"):
            f(hollow.triu(), 5)
        with pytest.raises(DecompositionError, match="positive semi-definite"):
            f(hollow, 5)


@pytest.mark.parametrize("method", [linalg.rsvd, linalg.srevd, linalg.nystrom, linalg.eigh], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("shift", [0.3, 40.0, -1e-3])
def test_a_shift_equals_the_shifted_matrix(
    method: Callable[..., LowRank], dtype: torch.dtype, tail: str, shift: float
) -> None:
    X = torch.stack([psd(60, decay=0.9, seed=i) for i in range(2)]) + 0.01 * torch.eye(60, dtype=torch.float64)
    X[1] *= 1e-6 if shift > 0 else 2.0
    X = X.to(dtype)
    more = () if method is linalg.eigh else (4, 2)
    seeds = [{} if method is linalg.eigh else {"generator": torch.Generator().manual_seed(1)} for _ in range(2)]
    low = method(X, 8, *more, tail=tail, shift=shift, **seeds[0])
    explicit = method(X + shift * torch.eye(60, dtype=dtype), 8, *more, tail=tail, **seeds[1])
    rounding = (2e-5 if dtype == torch.float32 else 1e-12) * (1 + abs(shift))
    torch.testing.assert_close(low.s, explicit.s, rtol=0, atol=rounding)
    torch.testing.assert_close(low.fill, explicit.fill, rtol=0, atol=rounding)
    torch.testing.assert_close(low.dense()[0], explicit.dense()[0], rtol=0, atol=200 * rounding)
    torch.testing.assert_close(low.U.mT @ low.U, torch.eye(8, dtype=dtype).expand(2, 8, 8), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", SKETCHES)
@pytest.mark.parametrize("rank", [2, 4, 30])
def test_a_warm_start_without_oversampling_still_finds_new_directions(method: str, rank: int) -> None:
    X = psd(120, rank=rank)
    g = torch.Generator().manual_seed(0)
    low = SKETCHES[method](X, rank, 0, 1, generator=g)
    new = torch.linalg.qr(torch.randn(120, 1, dtype=torch.float64, generator=g))[0]
    Y = X + 3.0 * new @ new.mT
    for _ in range(6):
        low = SKETCHES[method](Y, rank, 0, 1, start=low.U, generator=g)
    assert low.rank == rank
    assert float(torch.linalg.vector_norm(low.U.mT @ new)) > 0.99
    values = torch.linalg.eigvalsh(Y).flip(-1)[:rank]
    torch.testing.assert_close(low.s[:1], values[:1], rtol=1e-2, atol=0)
    cold, warm = (
        SKETCHES[method](Y, 1, 0, 1, start=start, generator=torch.Generator().manual_seed(2)) for start in (None, new)
    )
    assert torch.equal(cold.U, warm.U)  # the only column is a fresh one


def test_at_least_one_column_in_twenty_of_a_warm_sketch_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    X, real, drawn = psd(100, dtype=torch.float64), torch.randn, []

    def recording(*shape: int, **keywords: Any) -> torch.Tensor:
        drawn.append(shape)
        return real(*shape, **keywords)

    monkeypatch.setattr(torch, "randn", recording)
    start = torch.eye(100, dtype=X.dtype)
    for rank, oversampling in ((1, 0), (5, 0), (60, 0), (60, 1), (30, 10)):
        linalg.nystrom(X, rank, oversampling, 0, start=start[:, :rank])
    linalg.nystrom(X, 30, 10, 0, start=start[:, :7])
    assert drawn == [(100, 1), (100, 1), (100, 3), (100, 3), (100, 10), (100, 33)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", SKETCHES)
@pytest.mark.parametrize(("q", "keep"), [(0, False), (2, False), (1, True)])
def test_bases_are_orthonormal_for_any_spectrum_and_any_start(
    method: str, q: int, keep: bool, dtype: torch.dtype
) -> None:
    d, rank = 100, 12
    g = torch.Generator().manual_seed(5)
    rows = torch.randn(20, d, dtype=torch.float64, generator=g)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    random = torch.linalg.qr(torch.randn(d, rank, dtype=torch.float64, generator=g))[0]
    duplicate = random.clone()
    duplicate[:, 3] = duplicate[:, 7] = duplicate[:, 0]
    nearly = random[:, :1] + 1e-7 * random
    starts = {
        "cold": None,
        "zero": torch.zeros(d, rank),
        "duplicate": duplicate,
        "nearly parallel": nearly,
        "huge and tiny": random * torch.logspace(-30, 30, rank),
    }
    matrices = {
        "identity": torch.eye(d),
        "nearly identity": 0.95 * torch.eye(d) + 0.05 * rows.T @ rows / 20,
        "zero": torch.zeros(d, d),
        "ones": torch.ones(d, d),
        "one entry": torch.diag(torch.eye(d)[0]),
        "projector": rows.T @ torch.linalg.inv(rows @ rows.T) @ rows,
    }
    for (what, X), (how, start) in itertools.product(matrices.items(), starts.items()):
        X = ((X + X.mT) / 2).to(dtype)
        low = SKETCHES[method](
            X,
            rank,
            4,
            q,
            start=None if start is None else start.to(dtype),
            tail="trace",
            generator=g,
            keep_start=keep,
        )
        assert bool(torch.isfinite(low.s).all()), (what, how)
        off = float((low.U.mT @ low.U - torch.eye(rank, dtype=dtype)).abs().max())
        assert off <= tolerance, (what, how, off)
        assert float(low.s[0]) <= float(torch.linalg.eigvalsh(X.double())[-1]) * (1 + tolerance), (what, how)


def test_a_start_that_is_not_finite_is_named() -> None:
    start = torch.eye(40, dtype=torch.float64)[:, :5].clone()
    start[0, 0] = float("nan")
    with pytest.raises(DecompositionError, match=r"start of layer 2"):
        linalg.rsvd(psd(40), 5, 3, 1, start=start, name="layer 2")

"""LAPACK misbehaves: it gives up, or returns NaN in one output, in float32 alone or always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import DecompositionError, LowRank, lapack

Outputs = tuple[Tensor, ...]
D, RANK = 60, 6


# Made beforehand, by the very solvers that the tests break.
X, BROAD = psd(D), psd(D, decay=0.9)
LOW = LowRank(torch.linalg.eigh(X).eigenvectors.flip(-1)[:, :RANK], torch.linalg.eigvalsh(X).flip(-1)[:RANK])
COLUMNS = torch.randn(D, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _low(dtype: torch.dtype) -> LowRank:
    return LowRank(LOW.U.to(dtype), LOW.s.to(dtype))


# What each routine leans on; the others it must not need. `orthonormal` squares nothing it cannot do by Householder.
ROUTINES: dict[str, tuple[Callable[[torch.dtype], LowRank | Outputs], set[str]]] = {
    "rsvd": (lambda t: linalg.rsvd(BROAD.to(t), RANK, 4, 2, generator=_seeded()), {"svd"}),
    "srevd": (lambda t: linalg.srevd(BROAD.to(t), RANK, 4, 2, generator=_seeded()), {"eigh"}),
    "nystrom": (
        lambda t: linalg.nystrom(BROAD.to(t), RANK, 4, 2, generator=_seeded()),
        {"svd", "cholesky_ex", "solve_triangular"},
    ),
    "eigh": (lambda t: linalg.eigh(X.to(t), RANK), {"eigh"}),
    "adaptive": (
        lambda t: linalg.adaptive(X.to(t), 0.5, first_rank=RANK, oversampling=4, generator=_seeded()),
        {"svd", "cholesky_ex", "solve_triangular"},
    ),
    "online_update": (lambda t: linalg.online_update(_low(t), COLUMNS[:, :4].to(t), 0.9), {"svd", "eigh"}),
    "online_update, wide": (
        lambda t: linalg.online_update(_low(t), torch.cat([COLUMNS, 2 * COLUMNS.flip(0)], 1).to(t), 0.9),
        {"qr", "svd", "eigh"},
    ),
    "correct": (lambda t: linalg.correct(_low(t), BROAD.to(t), torch.tensor([0, 2])), {"eigh"}),
    "orthonormal, tall": (lambda t: linalg.orthonormal(COLUMNS[:, :5].to(t)), set()),
    "orthonormal, square": (lambda t: linalg.orthonormal(COLUMNS.to(t)), {"qr"}),
}
OUTPUTS = {"eigh": 2, "svd": 3, "qr": 2, "cholesky_ex": 1, "solve_triangular": 1}
FAULTS = [(solver, fault) for solver, n in OUTPUTS.items() for fault in ["raises", *range(n)]]


def _outputs(result: LowRank | Outputs) -> Outputs:
    return (result.U, result.s) if isinstance(result, LowRank) else result


def _break(
    patch: pytest.MonkeyPatch, solver: str, fault: str | int, dtypes: tuple[torch.dtype, ...]
) -> list[torch.dtype]:
    """Let torch.linalg.<solver> fail in these dtypes: raise, or put one NaN into the output with that number."""
    real, seen = getattr(torch.linalg, solver), []

    def faulty(first: Tensor, *rest: Any, **keywords: Any) -> Any:
        seen.append(first.dtype)
        if first.dtype not in dtypes:
            return real(first, *rest, **keywords)
        if fault == "raises":
            raise torch.linalg.LinAlgError("did not converge")
        outputs = real(first, *rest, **keywords)
        single = isinstance(outputs, Tensor)
        parts = [outputs] if single else list(outputs)
        spoilt = parts[int(fault)].clone()
        spoilt[(-1,) * spoilt.ndim] = float("nan")
        parts[int(fault)] = spoilt
        return spoilt if single else tuple(parts)

    patch.setattr(torch.linalg, solver, faulty)
    return seen


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("solver, fault", FAULTS)
def test_a_solver_that_fails_in_float32_is_asked_again_in_float64(
    monkeypatch: pytest.MonkeyPatch, routine: str, solver: str, fault: str | int
) -> None:
    run, needed = ROUTINES[routine]
    expected = _outputs(run(torch.float32))
    seen = _break(monkeypatch, solver, fault, (torch.float32,))
    outputs = _outputs(run(torch.float32))
    assert (solver not in needed) or seen[:2] == [torch.float32, torch.float64]
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.abs(), wanted.abs(), rtol=1e-3, atol=1e-4)  # signs of vectors are free


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("solver, fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_solver_that_always_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, routine: str, solver: str, fault: str | int, dtype: torch.dtype
) -> None:
    run, needed = ROUTINES[routine]
    seen = _break(monkeypatch, solver, fault, (torch.float32, torch.float64))
    if solver in needed:
        with pytest.raises(DecompositionError, match="failed, also in float64"):
            run(dtype)
        assert seen[-1] == torch.float64
    else:
        assert all(bool(torch.isfinite(output).all()) for output in _outputs(run(dtype)))


def test_the_error_says_which_matrix_and_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, "eigh", "raises", (torch.float32, torch.float64))
    with pytest.raises(DecompositionError, match=r"features\.3.*10 x 10"):
        linalg.eigh(torch.eye(10), name="features.3")


def test_a_matrix_that_is_not_positive_definite_has_no_cholesky_factor() -> None:
    assert lapack.cholesky(-torch.eye(3), "it") is None
    torch.testing.assert_close(lapack.cholesky(4 * torch.eye(3), "it"), 2 * torch.eye(3))

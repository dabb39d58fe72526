"""LAPACK's float32 SVD can return finite singular values beside NaN vectors: nothing it returns is trusted unseen."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch

import rkfac
from optim import stated
from optim.numbers.injections import assert_finite
from optim.problems import assert_moved, mlp, parameters, rows, same, step, twin

SMALL: dict[str, Any] = {"rank": 3, "oversampling": 1, "factor_every": 1, "inverse_every": 1}
SKETCHES = [rkfac.RSVD(), rkfac.Nystrom()]  # both take a small SVD


def lying(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> list[torch.dtype]:
    genuine, asked = torch.linalg.svd, []

    def svd(R: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        asked.append(R.dtype)
        U, s, Vh = genuine(R, *rest, **keywords)
        return (torch.full_like(U, math.nan), s, torch.full_like(Vh, math.nan)) if R.dtype in dtypes else (U, s, Vh)

    monkeypatch.setattr(torch.linalg, "svd", svd)
    return asked


@pytest.mark.parametrize("sketch", SKETCHES, ids=["RSVD", "Nystrom"])
def test_nan_vectors_in_float32_are_computed_again_in_float64(
    sketch: rkfac.RSVD, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(dtype=torch.float32)
    other = twin(model)
    optimizer, healthy = (stated.KFAC(m, decomposition=sketch, **SMALL) for m in (model, other))
    batches = [rows(dtype=torch.float32) for _ in range(4)]
    for batch in batches:
        step(other, healthy, batch)
    asked = lying(monkeypatch, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches:
            step(model, optimizer, batch)
    assert asked.count(torch.float64) == asked.count(torch.float32) > 0
    assert_finite(model, optimizer)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sketch", SKETCHES, ids=["RSVD", "Nystrom"])
def test_nan_vectors_in_both_precisions_leave_the_old_basis_in_use(
    sketch: rkfac.RSVD, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = stated.KFAC(model, decomposition=sketch, **SMALL)
    step(model, optimizer, rows(dtype=torch.float32))
    old = copy.deepcopy(optimizer.state_dict()["curvature"]["blocks"])
    start = parameters(model)
    lying(monkeypatch, torch.float32, torch.float64)
    with pytest.warns(UserWarning, match="previous basis is kept") as caught:
        step(model, optimizer, rows(dtype=torch.float32))
    for name, block in optimizer.state_dict()["curvature"]["blocks"].items():
        assert any(repr(name) in str(w.message) for w in caught)
        for side, factor in block["factors"].items():
            assert same(factor["basis"], old[name]["factors"][side]["basis"])
    assert_finite(model, optimizer)
    assert_moved(model, start)

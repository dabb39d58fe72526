"""Solutions added to parameters of another precision than the basis: a few rows at a time, and nothing of their size."""

from __future__ import annotations

import pytest
import torch

from linalg.matrices import psd
from rkfac import linalg
from rkfac.linalg import parts


@pytest.mark.parametrize("panel", [1, 30, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [(3, 4), (12, 4), (3, 9), (12, 9)])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
def test_panels_equal_the_dense_solution(
    panel: int, dtype: torch.dtype, ranks: tuple[int, int], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PANEL", panel)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    torch.manual_seed(0)
    G, A = (linalg.eigh(psd(d, seed=d).to(wide), r, tail="trace") for d, r in zip((12, 9), ranks, strict=True))
    J = (size * torch.randn(12, 9)).to(dtype)
    solution = linalg.preconditioner(A, G, linalg.product(G, A, 0.02)).solve(J.to(wide), None)
    assert isinstance(solution.weight, parts.Corrected), "this tries something else"
    target = (size * torch.randn(12, 9)).to(dtype)
    amount = 0.3 / solution.scale * solution.size  # steps of the parameter's size
    expected = 0.5 * target.double() + amount * solution.dense(J.to(wide), None)
    # the vector as a sum of two terms, one of them the target itself
    terms = [((J.double() - 2 * target.double()).to(wide), 1.0), (target, 2.0)]
    solution.weight.add_to(target, amount * solution.scale, terms, 0.5)
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(target.double() / size, expected / size, rtol=bound, atol=bound)

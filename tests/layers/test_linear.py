"""Linear layers: what becomes of gradients that cancel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rkfac.layers.linear import LinearAdapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_gradients_that_cancel_over_the_positions_sum_up_to_nothing(dtype: torch.dtype, scale: float) -> None:
    """As those of an attention's keys do, to which a common shift means nothing."""
    layer = nn.Linear(4, 5)
    g = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    cancelling = (g - g.mean(1, keepdim=True)).to(dtype)
    adapter = LinearAdapter()
    assert not adapter.output_rows(layer, cancelling, cancelling, "reduce").any()
    kept = adapter.output_rows(layer, g.to(dtype), g.to(dtype), "reduce")
    torch.testing.assert_close(kept.double(), g.to(dtype).double().sum(1), rtol=1e-2, atol=1e-5 * scale)
    assert adapter.output_rows(layer, cancelling, cancelling, "expand").any()
    spoiled = g.to(dtype).clone()
    spoiled[0, 0, 0] = float("inf")
    assert not torch.isfinite(adapter.output_rows(layer, spoiled, spoiled, "reduce")).all()

"""Strips, mirrors and folded triangles against the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rkfac.linalg import symmetric

SIZES = [1, 2, 3, 8, 159, 321, 640]
BATCHES = [(), (3,)]
each_size = pytest.mark.parametrize("d", SIZES)
each_batch = pytest.mark.parametrize("batch", BATCHES, ids=["one", "groups"])


def made_of(upper: Tensor) -> Tensor:
    """The symmetric matrix with this upper triangle."""
    return upper.triu() + upper.triu(1).mT


@each_size
@each_batch
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_rank_n_update_is_the_full_product(
    d: int, batch: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    rows, X = torch.randn(*batch, 7, d, dtype=dtype), torch.randn(*batch, d, d, dtype=dtype)
    expected = made_of(0.7 * X + 0.3 * rows.mT @ rows)
    updated = X.clone()
    symmetric.add_gram(symmetric.strips_of(updated), rows, 0.7, 0.3)
    blended = X.clone()
    symmetric.add_strips(blended, symmetric.gram(rows, 3.0), 0.7, 0.1)
    for found in (updated, blended):
        symmetric.mirror(found)
        assert torch.equal(found, found.mT)
        assert torch.linalg.norm(found - expected) <= tolerance * torch.linalg.norm(expected)


@each_size
def test_strips_take_hardly_more_than_half_of_a_large_matrix(d: int) -> None:
    strips = symmetric.strips_of(torch.zeros(d, d))
    assert symmetric.strip_elements(d) == sum(strip.numel() for strip in strips)
    if d == 640:
        assert symmetric.strip_elements(d) <= 0.63 * d * d
    assert symmetric.strip_elements(4097) <= 0.54 * 4097**2


@each_size
@each_batch
def test_a_folded_triangle_holds_every_entry_once_and_comes_back_to_the_bit(d: int, batch: tuple[int, ...]) -> None:
    X = torch.randn(*batch, d, d)  # what lies below the diagonal is not asked for
    packed = symmetric.folded(X)
    assert tuple(packed.shape) == (*batch, *symmetric.folded_shape(d))
    assert packed[(0,) * len(batch)].numel() == d * (d + 1) // 2
    assert torch.equal(symmetric.unfolded(packed, d), made_of(X))

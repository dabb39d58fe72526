"""Flat strips, mirrors and folded triangles against the whole matrix."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rkfac.linalg import symmetric

SIZES = [1, 2, 3, 7, 8, 159, 319, 320, 321, 640, 777]
BATCHES = [(), (3,)]
each_size = pytest.mark.parametrize("d", SIZES)
each_batch = pytest.mark.parametrize("batch", BATCHES, ids=["one", "groups"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def made_of(upper: Tensor) -> Tensor:
    """The symmetric matrix with this upper triangle."""
    return upper.triu() + upper.triu(1).mT


def cut(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    """Strips of any heights, with noise below the diagonal."""
    return [matrix[..., begin:end, begin:].clone() for begin, end in pairwise(cuts)]


def flat(matrix: Tensor) -> Tensor:
    return torch.cat([strip.flatten(-2) for strip in cut(matrix, symmetric.edges(matrix.shape[-1]))], -1)


@each_size
@each_batch
@each_dtype
def test_a_flat_matrix_comes_back_to_the_bit(d: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    X = torch.randn(*batch, d, d, dtype=dtype)
    held = flat(X)
    assert tuple(held.shape) == (*batch, symmetric.strip_elements(d))
    strips = symmetric.strips_of(held, d)
    assert all(torch.equal(own, part) for own, part in zip(strips, cut(X, symmetric.edges(d)), strict=True))
    assert {strip.untyped_storage().data_ptr() for strip in strips} == {held.untyped_storage().data_ptr()}
    whole = symmetric.mirrored(held, d)
    assert whole.dtype == dtype
    assert torch.equal(whole, made_of(X))
    assert whole.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()


@each_size
@each_batch
@each_dtype
def test_a_rank_n_update_is_the_full_product(d: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    rows, X = torch.randn(*batch, 7, d, dtype=dtype), torch.randn(*batch, d, d, dtype=dtype)
    expected = made_of(0.7 * X + 0.3 * rows.mT @ rows)
    updated, blended = flat(X), flat(X)
    symmetric.add_gram(symmetric.strips_of(updated, d), rows, 0.7, 0.3)
    symmetric.add_strips(symmetric.strips_of(blended, d), symmetric.gram(rows, 3.0), 0.7, 0.1)
    for held in (updated, blended):
        found = symmetric.mirrored(held, d)
        assert torch.linalg.norm(found - expected) <= tolerance * torch.linalg.norm(expected)


@each_size
@each_batch
@each_dtype
def test_strips_of_any_heights_are_added(d: int, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    X, other = torch.randn(*batch, d, d, dtype=dtype), torch.randn(*batch, d, d, dtype=torch.float32)
    expected = made_of(X.mul(0.7).add(other.to(dtype), alpha=0.3))
    several = sorted({0, d // 5, d // 2, d // 2 + 1, d - 1, d})
    for cuts in ([0, d], several, symmetric.edges(d), [*range(0, d, 37), d]):
        held = flat(X)
        symmetric.add_strips(symmetric.strips_of(held, d), cut(other, cuts), 0.7, 0.3)
        torch.testing.assert_close(symmetric.mirrored(held, d), expected)


@each_size
def test_strips_take_hardly_more_than_half_of_a_large_matrix(d: int) -> None:
    if d < 320:
        assert symmetric.strip_elements(d) == d * d
    if d == 640:
        assert symmetric.strip_elements(d) <= 0.63 * d * d
    assert symmetric.strip_elements(4097) <= 0.54 * 4097**2


@each_size
@each_batch
def test_a_folded_triangle_holds_every_entry_once_and_comes_back_to_the_bit(d: int, batch: tuple[int, ...]) -> None:
    X = torch.randn(*batch, d, d)  # what lies below the diagonal is not asked for
    packed = symmetric.folded(flat(X), d)
    assert tuple(packed.shape) == (*batch, *symmetric.folded_shape(d))
    entries = X[..., *torch.triu_indices(d, d)].flatten(len(batch))
    assert torch.equal(packed.flatten(-2).sort()[0], entries.sort()[0])
    assert torch.equal(symmetric.mirrored(symmetric.unfolded(packed, d), d), made_of(X))


def test_the_folded_format_is_the_one_of_saved_states() -> None:
    odd = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 5.0], [0.0, 0.0, 6.0]])
    assert symmetric.folded(flat(odd), 3).tolist() == [[1, 2, 3], [6, 4, 5]]
    even = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert symmetric.folded(flat(even), 2).tolist() == [[3, 1, 2]]


@each_size
@each_batch
def test_packed_entries_are_those_on_and_above_the_diagonal_once_each(d: int, batch: tuple[int, ...]) -> None:
    X = torch.randn(*batch, d, d, dtype=torch.float64)
    packed = symmetric.packed(flat(X), d)
    assert tuple(packed.shape) == (*batch, symmetric.packed_elements(d))
    i, j = torch.triu_indices(d, d)
    assert torch.equal(packed.sort(-1)[0], X[..., i, j].sort(-1)[0])
    assert torch.equal(symmetric.mirrored(symmetric.unpacked(packed, d), d), made_of(X))

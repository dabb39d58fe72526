"""The pieces that need no second process: who does which, tensors as bytes, buckets."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rkfac.distributed.assignment import assigned
from rkfac.distributed.parcels import label, opened, packed, size
from rkfac.distributed.world import BUCKET, buckets


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 4))
def test_nobody_has_a_third_more_to_do_than_in_the_best_assignment(costs: list[int], processes: int) -> None:
    load = [0.0] * processes
    found = assigned([float(c) for c in costs], load)
    assert load == [sum(c for c, who in zip(costs, found, strict=True) if who == rank) for rank in range(processes)]
    best = min(
        max(sum(c for c, who in zip(costs, choice, strict=True) if who == rank) for rank in range(processes))
        for choice in product(range(processes), repeat=len(costs))
    )
    assert max(load) <= 4 / 3 * best


def test_more_processes_than_pieces_leave_some_without() -> None:
    load = [0.0] * 5
    assert sorted(assigned([3.0, 2.0], load)) == [0, 1]
    assert load == [3.0, 2.0, 0.0, 0.0, 0.0]


def test_what_somebody_has_to_do_already_counts() -> None:
    assert assigned([1.0, 1.0], [10.0, 0.0]) == [1, 1]


def test_tensors_of_all_kinds_survive_as_bytes() -> None:
    parts = {
        "U": torch.randn(5, 3),
        "s": torch.randn(3, dtype=torch.float64),
        "tail": None,
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),  # what follows begins at an odd place
        "mean": torch.randn((), dtype=torch.float64),
        "turned": torch.randn(4, 6).mT,
        "name": "x",
        "nothing": torch.empty(0, 4),
    }
    message = packed([parts, parts], torch.device("cpu"))
    known = label(parts)
    assert message.numel() == 2 * size(known)
    for buffer in message.split(size(known)):
        found = opened(known, buffer)
        assert found.keys() == parts.keys()
        for name, value in parts.items():
            if isinstance(value, torch.Tensor):
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)
            else:
                assert found[name] == value


def test_an_empty_message_is_one() -> None:
    assert packed([], torch.device("cpu")).numel() == 0


@pytest.mark.parametrize("sizes", [[1], [BUCKET // 4 + 1], [10, BUCKET // 4, 10], [BUCKET // 16] * 9])
def test_buckets_keep_the_order_and_are_no_larger_than_they_must(sizes: list[int]) -> None:
    tensors = [torch.empty(n) for n in sizes]
    found = list(buckets(tensors))
    assert [id(t) for some in found for t in some] == [id(t) for t in tensors]
    for some in found:
        assert len(some) == 1 or sum(t.nbytes for t in some) <= BUCKET


def test_a_bucket_has_one_precision() -> None:
    tensors = [torch.empty(2), torch.empty(2, dtype=torch.float64), torch.empty(2)]
    assert [len(some) for some in buckets(tensors)] == [1, 1, 1]

"""The cost model: which way it leans, and that it is a model and no measurement."""

from __future__ import annotations

import pytest

from rkfac.linalg.cost import eigh_seconds, exact_is_cheaper, sketch_seconds


def crossover(width: int, power_iterations: int) -> int:
    """Smallest d at which a sketch is cheaper."""
    return next(d for d in range(width + 1, 10000) if not exact_is_cheaper(d, width, power_iterations))


def test_where_a_sketch_begins_to_pay() -> None:
    assert 200 <= crossover(40, 0) <= 300  # rank about 32: 192 measured equal, 257 a sketch
    assert 400 <= crossover(230, 1) <= 600  # the paper's width
    assert crossover(40, 1) < crossover(80, 1) < crossover(160, 1) < crossover(320, 1)


@pytest.mark.parametrize("width", [10, 50, 266])
def test_wide_matrices_are_sketched_and_whole_spaces_are_not(width: int) -> None:
    assert not exact_is_cheaper(4096, width, 4)
    assert exact_is_cheaper(width, width, 0)
    assert sketch_seconds(4096, width, 1) < eigh_seconds(4096) / 10

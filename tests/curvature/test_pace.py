"""The intervals of stale statistics, on curvatures that are plain numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from rkfac.curvature.pace import Pace


def intervals(values: Iterable[float], threshold: float = 0.1) -> list[int]:
    """After each look at a curvature of size one."""
    pace, seen = Pace(threshold), []
    for value in values:
        pace.took()
        pace.looked(value, lambda now, then: abs(now - then) / abs(then))
        seen.append(pace.interval)
    return seen


def test_a_constant_statistic_is_looked_at_at_fibonacci_intervals() -> None:
    assert intervals([1.0] * 9) == [1, 1, 2, 3, 5, 8, 13, 21, 34]


def test_independent_random_statistics_are_looked_at_every_step() -> None:
    draw = random.Random(0)
    assert set(intervals(2.0 ** draw.randint(-20, 20) for _ in range(50))) == {1}


def test_a_change_halves_the_interval_and_a_slow_drift_keeps_it() -> None:
    assert intervals([1.0] * 6 + [2.0]) == [1, 1, 2, 3, 5, 8, 4]
    # 8% from one look to the next, 16% over two of them
    assert intervals([1.0] * 5 + [1.0, 1.08, 1.08 * 1.08]) == [1, 1, 2, 3, 5, 8, 13, 13]
    # back where it was: halved twice, for it left and came again, then held by the one before
    assert intervals([1.0] * 6 + [2.0, 1.0, 1.0, 1.0]) == [1, 1, 2, 3, 5, 8, 4, 2, 2, 4]


def test_what_cannot_be_compared_counts_as_a_change() -> None:
    assert intervals([1.0] * 5 + [float("nan")]) == [1, 1, 2, 3, 5, 2]


def test_the_clock_counts_steps_that_were_taken() -> None:
    pace = Pace(0.1)
    assert pace.due  # at the very start
    pace.took()
    assert pace.due, "the same step is planned again until it was taken"
    pace.tick()
    pace.interval = 3
    for due in (False, False, True, True):
        assert pace.due == due
        pace.tick()
    assert pace.age == 5
    pace.took()
    pace.tick()
    assert pace.age == 1


@pytest.mark.parametrize(("age", "every"), [(1, 1), (7, 1), (7, 10)])
def test_the_time_constant_is_that_of_fixed_periods(age: int, every: int) -> None:
    pace = Pace(0.1)
    pace.age = age
    assert pace.decay(0.9, every) ** every == pytest.approx(0.9**age)
    assert pace.decay(0.0, every) == 0.0

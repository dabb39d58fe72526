from __future__ import annotations

from itertools import combinations, product

import pytest

from optim.pairs import chosen


@pytest.mark.parametrize("sizes", [(12, 3, 2, 2), (2, 2, 2), (4, 3, 3, 2, 2), (1, 1, 5)])
def test_every_pair_of_values_is_met_and_few_cases_are_taken(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcde", map(str, values), strict=False)) for values in product(*map(range, sizes))]
    taken = [cases[number] for number in chosen(cases)]
    for one, other in combinations("abcde"[: len(sizes)], 2):
        assert {(case[one], case[other]) for case in taken} == {(case[one], case[other]) for case in cases}
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(taken) <= 2 * largest * second
    assert len(taken) < len(cases) or sizes == (1, 1, 5)


def test_values_that_never_meet_are_not_waited_for() -> None:
    cases = [{"a": "0", "b": "0", "c": "x"}, {"a": "1", "b": "1", "c": "x"}]
    assert chosen(cases) == [0, 1]

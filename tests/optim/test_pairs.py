from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import pytest

from optim.pairs import chosen, thinned


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


def test_a_variant_has_one_case_of_a_test_each_time_another_and_is_no_member_s_pair() -> None:
    @dataclass
    class Spec:
        params: dict[str, str]

    @dataclass
    class Item:
        nodeid: str
        callspec: Spec

    members, values = ("kin", "first", "second", "third"), "abc"
    items = [Item(f"t[{m}-{v}]", Spec({"build": m, "value": v})) for m, v in product(members, values)]
    run, left_out = thinned(items, {"first", "second", "third"})  # type: ignore[arg-type]
    names = [item.nodeid for item in run]
    assert names == ["t[kin-a]", "t[kin-b]", "t[kin-c]", "t[first-a]", "t[second-b]", "t[third-c]"]
    assert len(run) + len(left_out) == len(items)

"""All pairs instead of all combinations: which cases of a test with three and more parameters are taken.

Every value of every parameter still meets every value of every other one. What takes three values at once to go wrong is
looked for by RKFAC_WHOLE=1, which takes all combinations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import pytest

Case = Mapping[str, str]  # parameter -> its value


def chosen(cases: Sequence[Case]) -> list[int]:
    """Numbers of the cases that hold every pair of values that any of them holds, each time the one with most new pairs."""
    left = [set(combinations(sorted(case.items()), 2)) for case in cases]
    missing, taken = set().union(*left), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(left[number] & missing))
        missing -= left[best]
        taken.append(best)
    return sorted(taken)


def thinned(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What is run and what is not, in the order of collection."""
    every, tests = list(items), defaultdict[str, list[pytest.Function]](list)
    for item in every:
        if hasattr(item, "callspec") and len(item.callspec.params) > 2:
            tests[item.nodeid.split("[")[0]].append(item)
    left_out: set[str] = set()
    for cases in tests.values():
        kept = set(chosen([_values(case) for case in cases]))
        left_out |= {case.nodeid for number, case in enumerate(cases) if number not in kept}
    return [i for i in every if i.nodeid not in left_out], [i for i in every if i.nodeid in left_out]


def _values(item: pytest.Function) -> Case:
    return {name: repr(value) for name, value in item.callspec.params.items()}

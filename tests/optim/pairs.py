"""Which cases of a test with many are taken: all pairs instead of all combinations, and one case of each variant.

With three and more parameters every value of every one still meets every value of every other one. Variants of optimizers
(`enrolled.py`) go through every test once, each in another case. What is left out is looked for by RKFAC_WHOLE=1, which takes
all combinations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
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


def thinned(items: Iterable[pytest.Item], variants: Container[str] = ()) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What is run and what is not, in the order of collection; `variants`: values of `build` that have one case each."""
    every, tests = list(items), defaultdict[str, list[pytest.Function]](list)
    rotating = defaultdict[str, dict[str, list[str]]](dict)
    for item in every:
        if not hasattr(item, "callspec"):
            continue
        test, member = item.nodeid.split("[")[0], item.callspec.params.get("build")
        if isinstance(member, str) and member in variants:
            rotating[test].setdefault(member, []).append(item.nodeid)
        elif len(item.callspec.params) > 2:
            tests[test].append(item)
    left_out: set[str] = set()
    for cases in tests.values():
        kept = set(chosen([_values(case) for case in cases]))
        left_out |= {case.nodeid for number, case in enumerate(cases) if number not in kept}
    for own in rotating.values():
        for turn, nodes in enumerate(own.values()):
            left_out |= set(nodes) - {nodes[turn % len(nodes)]}
    return [i for i in every if i.nodeid not in left_out], [i for i in every if i.nodeid in left_out]


def _values(item: pytest.Function) -> Case:
    return {name: repr(value) for name, value in item.callspec.params.items()}

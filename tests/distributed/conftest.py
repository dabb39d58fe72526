"""Crews that last as long as the tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.crew import Crew


@pytest.fixture(scope="session")
def _crews() -> Iterator[dict[int, Crew]]:
    crews: dict[int, Crew] = {}
    yield crews
    for crew in crews.values():
        crew.dismiss()


def _of(crews: dict[int, Crew], size: int) -> Crew:
    if size not in crews:
        crews[size] = Crew(size)
    return crews[size]


@pytest.fixture
def pair(_crews: dict[int, Crew]) -> Crew:
    return _of(_crews, 2)


@pytest.fixture
def four(_crews: dict[int, Crew]) -> Crew:
    return _of(_crews, 4)


@pytest.fixture(params=[2, 4], ids=["2 processes", "4 processes"])
def crew(request: pytest.FixtureRequest, _crews: dict[int, Crew]) -> Crew:
    return _of(_crews, request.param)

"""The fixture that runs a test once for each enrolled optimizer, and how often: `optim/pairs.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rkfac
from optim.enrolled import MEMBERS


@pytest.fixture(params=MEMBERS)
def build(request: pytest.FixtureRequest) -> Callable[..., rkfac.KFAC]:
    """build(model, **keywords) -> optimizer."""
    return MEMBERS[request.param]

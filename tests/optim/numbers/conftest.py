"""The fixture that runs a test once for each enrolled optimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rkfac
from optim.enrolled import OPTIMIZERS


@pytest.fixture(params=OPTIMIZERS)
def build(request: pytest.FixtureRequest) -> Callable[..., rkfac.KFAC]:
    """build(model, **keywords) -> optimizer."""
    return OPTIMIZERS[request.param]

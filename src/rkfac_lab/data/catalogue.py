"""Which datasets exist and which of them are on this machine."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import LabError
from .base import Dataset, Sources
from .cifar import cifar10
from .digits import digits
from .idx import fashion_mnist
from .text import text

LOADERS: dict[str, Callable[[Sources], Dataset]] = {
    "digits": digits,
    "text": text,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}


def describe(sources: Sources) -> list[str]:
    """One line a dataset: its size where it can be read, else what is missing; reading is the only honest check."""
    lines = []
    for name, load in LOADERS.items():
        try:
            found = load(sources)
            state = f"{len(found.train_x):,} training and {len(found.test_x):,} test samples"
        except LabError as error:
            state = str(error)
        lines.append(f"{name:14} {state}")
    return lines

"""Which datasets exist and which of them are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

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


class Entry(NamedTuple):
    """One dataset: its samples where it can be read, else what is missing."""

    name: str
    train: int | None = None
    test: int | None = None
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.name:14} {self.missing or f'{self.train:,} training and {self.test:,} test samples'}"


def entries(sources: Sources) -> Iterator[Entry]:
    """All of them; reading is the only honest check."""
    for name, load in LOADERS.items():
        try:
            found = load(sources)
            yield Entry(name, len(found.train_x), len(found.test_x))
        except LabError as error:
            yield Entry(name, missing=str(error))

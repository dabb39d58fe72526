"""What rows of a layer are gathered in until the step: a moment of them, or the rows themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor


class Readable(Protocol):
    """A part of it."""

    def readings(self) -> list[Tensor]:
        """Numbers the host must know before it can be used."""


Part = TypeVar("Part", bound=Readable)


class Collected(ABC, Generic[Part]):
    """Parts that are read by the host all at once."""

    def __init__(self) -> None:
        self.scale = 1.0  # what turns it into the curvature, set by `Statistics.settle`
        self._numbers: list[int] = []

    @property
    @abstractmethod
    def _parts(self) -> Sequence[Part]:
        """In the order in which they are read."""

    @property
    def numbers(self) -> int:
        """How many numbers `readings` were."""
        return sum(self._numbers)

    def readings(self) -> list[Tensor]:
        """Numbers the host must know before it can be used."""
        readings = [part.readings() for part in self._parts]
        self._numbers = [len(own) for own in readings]
        return [number for own in readings for number in own]

    def settle(self, numbers: Sequence[float]) -> bool:
        """Take what `readings` were; whether everything is finite."""
        return all(map(math.isfinite, numbers)) and self._settled(numbers)

    @abstractmethod
    def _settled(self, numbers: Sequence[float]) -> bool:
        """The same for numbers that are finite themselves."""

    def _by_part(self, numbers: Sequence[float]) -> Iterator[tuple[Part, Sequence[float]]]:
        """Each part with the numbers that its readings were."""
        at = 0
        for part, count in zip(self._parts, self._numbers, strict=True):
            yield part, numbers[at : at + count]
            at += count

"""What a moment is the sum of: rows as they came, sums of them, diagonals, and what several processes have added up.

Products are formed in units of a power of two near the largest entry, so that squares of gradients of 1e-20 and of inputs
of 1e+20 are still numbers; the powers themselves are plain integers once a step has read them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg import peak
from rkfac.linalg.symmetric import add_gram, add_strips

# So that the unit itself is a number in the rows' precision, and its square one in float64.
LARGEST_EXPONENT = {torch.float32: 120, torch.float64: 480}
ORDINARY = 24  # binary exponents of rows that can be squared as they are: 2^48 is far from any end of float32


def unit(peak: Tensor) -> Tensor:
    """The power of two that brings a largest entry near one, on its device: nobody waits for it."""
    bounded = peak.clamp(2.0 ** -LARGEST_EXPONENT[peak.dtype], 2.0 ** LARGEST_EXPONENT[peak.dtype])
    return torch.frexp(bounded).mantissa / bounded


def exponent_of(peak: float, dtype: torch.dtype) -> int:
    """The same as a number: `unit` is 2 to the power of minus this."""
    largest = LARGEST_EXPONENT[dtype]
    return math.frexp(min(max(peak, 2.0**-largest), 2.0**largest))[1]


class Part(ABC):
    """A summand of a moment; what the host has read of it are its largest entry and the unit of its products."""

    exponent = 0  # of about its largest row
    unit_exponent = 0

    @abstractmethod
    def readings(self) -> list[Tensor]:
        """Numbers whose largest magnitude is that of its rows, NaN or Inf if there is one."""

    @abstractmethod
    def settle(self, largest: float) -> None:
        """Take what `readings` were."""

    @abstractmethod
    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        """strips <- keep * strips + take * this, in units of 2^unit_exponent."""

    @abstractmethod
    def trace(self) -> Tensor:
        """In true units, in float64."""


class Seen(Part):
    """One that came in here, and not from other processes."""

    @abstractmethod
    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        """strips <- strips + this in units of 4^exponent, before anything was read of it."""


@dataclass(eq=False)
class Rows(Seen):
    """Rows of one weight, as they are until the step: one fused product updates the average in place."""

    rows: Tensor
    weight: float

    def readings(self) -> list[Tensor]:
        return list(torch.aminmax(self.rows))

    def settle(self, largest: float) -> None:
        self.exponent = exponent_of(largest, self.rows.dtype)
        self.unit_exponent = 0 if abs(self.exponent) <= ORDINARY else self.exponent

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        rows = self.rows if self.unit_exponent == 0 else self.rows * 2.0**-self.unit_exponent
        add_gram(strips, rows.to(strips[0]), keep, take * self.weight)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        add_gram(strips, (self.rows * 2.0**-exponent).to(strips[0]), 1.0, self.weight)

    def trace(self) -> Tensor:
        return self.weight * torch.linalg.vector_norm(self.rows, dtype=torch.float64).square()


@dataclass(eq=False)
class Sum(Seen):
    """The second moment of all rows so far in strips, that is half of a matrix, in units of their largest entry.

    It cannot go into the average at once: until the step it may still turn out not to be finite, or be dropped.
    """

    strips: list[Tensor]
    largest: Tensor

    def add(self, rows: Tensor, weight: float) -> None:
        """Some more rows, in the larger of the two units."""
        add_gram(self.strips, rows * self._widened(peak(rows)), 1.0, weight)

    def join(self, strips: Sequence[Tensor], largest: Tensor) -> None:
        """Another sum, cut alike, in units of its own largest entry."""
        factor = (self._widened(largest) / unit(largest)).square()
        for own, other in zip(self.strips, strips, strict=True):
            own.addcmul_(other, factor)

    def _widened(self, largest: Tensor) -> Tensor:
        """Go over to the unit for a new largest entry."""
        before, self.largest = unit(self.largest), torch.maximum(self.largest, largest)
        now = unit(self.largest)
        for strip in self.strips:
            strip.mul_((now / before).square())
        return now

    def readings(self) -> list[Tensor]:
        # Finite rows in units of their largest have finite sums; what is not finite all the same shows here.
        return [self.largest + 0 * torch.stack([strip.sum() for strip in self.strips]).sum()]

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = exponent_of(largest, self.largest.dtype)

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        add_strips(strips, self.strips, keep, take)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        factor = (unit(self.largest) * 2.0**exponent).square().reciprocal()
        add_strips(strips, [strip * factor for strip in self.strips], 1.0, 1.0)

    def trace(self) -> Tensor:
        diagonals = [strip.diagonal(dim1=-2, dim2=-1).double().sum() for strip in self.strips]
        return torch.stack(diagonals).sum() / unit(self.largest).double().square()


@dataclass(eq=False)
class Diagonal(Seen):
    """A diagonal that is only added up; counts need no units."""

    values: Tensor

    def readings(self) -> list[Tensor]:
        return list(torch.aminmax(self.values))

    def settle(self, largest: float) -> None:
        pass

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        (value,) = strips
        value.mul_(keep).add_(self.values.to(value), alpha=take)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        (value,) = strips
        value.add_((self.values * 4.0**-exponent).to(value))

    def trace(self) -> Tensor:
        return self.values.double().sum()


@dataclass(eq=False)
class Squares(Diagonal):
    """A diagonal of squares, in float64: their units go along."""

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = exponent_of(math.sqrt(largest), self.values.dtype)

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        (value,) = strips
        value.mul_(keep).add_((self.values * 4.0**-self.unit_exponent).to(value), alpha=take)


@dataclass(eq=False)
class Total(Part):
    """What several processes have added up, laid out as the factor that it is for, in units of 4^known."""

    strips: list[Tensor]
    known: int

    def readings(self) -> list[Tensor]:
        return [torch.stack([peak(strip) for strip in self.strips]).max()]

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = self.known

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        for strip, own in zip(strips, self.strips, strict=True):
            strip.mul_(keep).add_(own.to(strip), alpha=take)

    def trace(self) -> Tensor:
        square = self.strips[0].ndim > 1
        diagonals = [strip.diagonal(dim1=-2, dim2=-1) if square else strip for strip in self.strips]
        return torch.stack([d.double().sum() for d in diagonals]).sum() * 4.0**self.known


@dataclass(eq=False)
class Elsewhere(Part):
    """What another process has of it; here its trace is known, in units of 4^known."""

    known_trace: Tensor
    known: int

    def readings(self) -> list[Tensor]:
        return [self.known_trace]

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = self.known

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        raise RuntimeError("another process keeps this average")

    def trace(self) -> Tensor:
        return self.known_trace * 4.0**self.known

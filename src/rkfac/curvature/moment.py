"""Second moments of the rows that one step tells about, until they enter a running average.

Products are formed in units of a power of two near the largest entry, so that squares of gradients of 1e-20 and of inputs
of 1e+20 are still numbers; the powers themselves are plain integers once a step has read them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.curvature.collected import Collected
from rkfac.linalg import peak
from rkfac.linalg.symmetric import add_gram, add_strips, gram, strip_elements

# So that the unit itself is a number in the rows' precision, and its square one in float64.
LARGEST_EXPONENT = {torch.float32: 120, torch.float64: 480}
ORDINARY = 24  # binary exponents of rows that can be squared as they are: 2^48 is far from any end of float32
CHUNK = 1 << 23  # elements of rows that are multiplied by their unit at once: 32 MB in float32
SMALL = 1 << 17  # elements of rows that are kept though their sum would take less: one product, later


def unit(peak: Tensor) -> Tensor:
    """The power of two that brings a largest entry near one, on its device: nobody waits for it."""
    bounded = peak.clamp(2.0 ** -LARGEST_EXPONENT[peak.dtype], 2.0 ** LARGEST_EXPONENT[peak.dtype])
    return torch.frexp(bounded).mantissa / bounded


def _exponent(peak: float, dtype: torch.dtype) -> int:
    """The same as a number: `unit` is 2 to the power of minus this."""
    largest = LARGEST_EXPONENT[dtype]
    return math.frexp(min(max(peak, 2.0**-largest), 2.0**largest))[1]


class _Part(ABC):
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
    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        """strips <- strips + this in units of 4^exponent, before anything was read of it."""

    @abstractmethod
    def trace(self) -> Tensor:
        """In true units, in float64."""


@dataclass(eq=False)
class _Rows(_Part):
    """Rows of one weight, as they are until the step: one fused product updates the average in place."""

    rows: Tensor
    weight: float

    def readings(self) -> list[Tensor]:
        return list(torch.aminmax(self.rows))

    def settle(self, largest: float) -> None:
        self.exponent = _exponent(largest, self.rows.dtype)
        self.unit_exponent = 0 if abs(self.exponent) <= ORDINARY else self.exponent

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        rows = self.rows if self.unit_exponent == 0 else self.rows * 2.0**-self.unit_exponent
        add_gram(strips, rows.to(strips[0]), keep, take * self.weight)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        add_gram(strips, (self.rows * 2.0**-exponent).to(strips[0]), 1.0, self.weight)

    def trace(self) -> Tensor:
        return self.weight * torch.linalg.vector_norm(self.rows, dtype=torch.float64).square()


@dataclass(eq=False)
class _Sum(_Part):
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
        self.exponent = self.unit_exponent = _exponent(largest, self.largest.dtype)

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        add_strips(strips, self.strips, keep, take)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        factor = (unit(self.largest) * 2.0**exponent).square().reciprocal()
        add_strips(strips, [strip * factor for strip in self.strips], 1.0, 1.0)

    def trace(self) -> Tensor:
        diagonals = [strip.diagonal(dim1=-2, dim2=-1).double().sum() for strip in self.strips]
        return torch.stack(diagonals).sum() / unit(self.largest).double().square()


@dataclass(eq=False)
class _Diagonal(_Part):
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
class _Squares(_Diagonal):
    """A diagonal of squares, in float64: their units go along."""

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = _exponent(math.sqrt(largest), self.values.dtype)

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        (value,) = strips
        value.mul_(keep).add_((self.values * 4.0**-self.unit_exponent).to(value), alpha=take)


@dataclass(eq=False)
class _Total(_Part):
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

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        raise RuntimeError("it was added up already")

    def trace(self) -> Tensor:
        square = self.strips[0].ndim > 1
        diagonals = [strip.diagonal(dim1=-2, dim2=-1) if square else strip for strip in self.strips]
        return torch.stack([d.double().sum() for d in diagonals]).sum() * 4.0**self.known


@dataclass(eq=False)
class _Elsewhere(_Part):
    """What another process has of it; here its trace is known, in units of 4^known."""

    known_trace: Tensor
    known: int

    def readings(self) -> list[Tensor]:
        return [self.known_trace]

    def settle(self, largest: float) -> None:
        self.exponent = self.unit_exponent = self.known

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float) -> None:
        raise RuntimeError("another process keeps this average")

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        raise RuntimeError("it was added up already")

    def trace(self) -> Tensor:
        return self.known_trace * 4.0**self.known


class Moment(Collected[_Part]):
    """sum w r r^T over the rows seen since the last step; moments add up, `add` takes more rows of one weight w.

    Rows are kept while they take no more memory than their sum (or little of it), and summed up from then on.
    """

    wants_rows = False  # whether rows are needed even where their sum is had faster without

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[_Rows] = []
        self._sum: _Sum | None = None
        self._finished: _Sum | None = None  # cut otherwise than sums of rows
        self._total: _Total | _Elsewhere | None = None  # in the place of all that was seen here
        self._elements = 0
        self._dead = False

    def add(self, rows: Tensor, weight: float = 1.0, source: Tensor | None = None) -> None:
        """Take rows (..., n, d); rows that stand for others as well weigh more than one.

        Kept rows are copied unless they are known not to lie in the memory of the `source` they were made from: that
        may change before the step, as an input buffer used again or an output gradient that became some .grad does.
        """
        self._elements += rows.numel()
        if self._sum is None and self._keeps(rows):
            owned = source is not None and not _share_memory(rows, source)
            self._kept.append(_Rows(rows if owned else rows.clone(), weight))
            return
        kept, self._kept = self._kept, []
        for part in [*kept, _Rows(rows, weight)]:
            chunk = max(1, CHUNK * part.rows.shape[-2] // part.rows.numel())
            for some in part.rows.split(chunk, dim=-2):
                self._add_to_sum(some, part.weight)

    def _keeps(self, rows: Tensor) -> bool:
        """Whether rows are still worth keeping, these included."""
        return self._elements <= max(rows.shape[:-2].numel() * strip_elements(rows.shape[-1]), SMALL)

    def _add_to_sum(self, rows: Tensor, weight: float) -> None:
        if self._sum is not None:
            self._sum.add(rows, weight)
            return
        largest = peak(rows)
        self._sum = _Sum(gram(rows * unit(largest), weight), largest)

    def add_finished(self, made: Callable[[Tensor], list[Tensor]], largest: Tensor) -> None:
        """Take a second moment made without rows, in strips; `largest` is the largest entry that rows would have had."""
        strips = made(unit(largest))
        if self._finished is None:
            self._finished = _Sum(strips, largest)
        else:
            self._finished.join(strips, largest)

    @property
    def _parts(self) -> list[_Part]:
        return self._seen if self._total is None else [self._total]

    @property
    def _seen(self) -> list[_Part]:
        """What came in here."""
        return [*self._kept, *(part for part in (self._sum, self._finished) if part is not None)]

    @property
    def exponent(self) -> int | None:
        """Binary, of about the largest row, once it is settled; None where there is none but zeros."""
        return None if self._dead or self.empty else max(part.exponent for part in self._parts)

    def add_to(self, strips: Sequence[Tensor], exponent: int) -> None:
        """strips <- strips + moment in units of 4^exponent, without a look at it: nobody waits for the device."""
        for part in self._seen:
            part.add_to(strips, exponent)

    def pooled(self, strips: list[Tensor], exponent: int) -> None:
        """Stand for what several processes have added up, in units of 4^exponent."""
        self._total = _Total(strips, exponent)

    def left(self, trace: Tensor, exponent: int) -> None:
        """The same where another process keeps the sum."""
        self._total = _Elsewhere(trace, exponent)

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._parts

    def _settled(self, numbers: Sequence[float]) -> bool:
        self._dead = not any(numbers)
        for part, own in self._by_part(numbers):
            part.settle(max(map(abs, own)))
        return True

    @property
    def level(self) -> float:
        """Binary logarithm of about the largest entry of the scaled moment; -inf when all rows were zero."""
        return -math.inf if self._dead else math.log2(self.scale) + 2 * max(part.exponent for part in self._parts)

    def trace(self) -> Tensor:
        """Of the moment before it is scaled, in float64 and on its device."""
        return torch.stack([part.trace() for part in self._parts]).sum()

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float, exponent: int) -> None:
        """strips <- keep * strips + take * scale * moment, in place, the strips being in units of 2^exponent."""
        if self._dead:
            for strip in strips:
                strip.mul_(keep)
            return
        for part in self._parts:
            part.blend_into(strips, keep, take * self.scale * 2.0 ** (2 * part.unit_exponent - exponent))
            keep = 1.0


class JoinedMoment(Moment):
    """A sum of moments, each with a scale of its own."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        super().__init__()
        self._moments = [moment for moment in moments if moment.scale > 0]

    @property
    def level(self) -> float:
        """Of the largest."""
        return max((moment.level for moment in self._moments), default=-math.inf)

    def blend_into(self, strips: Sequence[Tensor], keep: float, take: float, exponent: int) -> None:
        """One after the other."""
        for moment in self._moments:
            moment.blend_into(strips, keep, take, exponent)
            keep = 1.0
        if not self._moments:
            for strip in strips:
                strip.mul_(keep)


class RowsMoment(Moment):
    """The rows themselves, for factors that are not matrices; with `most`, fewer than that, and their sum from there on."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = most
        self.wants_rows = most is None

    def _keeps(self, rows: Tensor) -> bool:
        return self._most is None or self._elements < self._most * math.prod(rows.shape[:-2]) * rows.shape[-1]

    @property
    def rows(self) -> int | None:
        """How many are kept; None: they were summed up."""
        return None if self._sum or self._finished else sum(part.rows.shape[-2] for part in self._kept)

    @property
    def dead(self) -> bool:
        """Whether all rows were zero."""
        return self._dead

    def weighted(self) -> tuple[Tensor, float]:
        """Rows C (..., n, d) with entries of about one and a number c: c C^T C is the scaled moment."""
        exponent = max(part.exponent for part in self._kept)
        parts = [part.rows * (2.0**-exponent * part.weight**0.5) for part in self._kept]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2), self.scale * 2.0 ** (2 * exponent)


class DiagonalMoment(Moment):
    """The diagonal of a sum over one-hot rows: counts, which are only added up."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: _Diagonal | None = None

    def add(self, rows: Tensor, weight: float = 1.0, source: Tensor | None = None) -> None:
        """Take a diagonal (d,)."""
        values = rows if weight == 1.0 else rows * weight
        self._counts = _Diagonal(values if self._counts is None else values + self._counts.values)

    @property
    def _seen(self) -> list[_Part]:
        return [] if self._counts is None else [self._counts]


class SquareMoment(DiagonalMoment):
    """The diagonal of sum w r r^T over rows of any kind: no matrix as wide as a vocabulary is ever formed."""

    def add(self, rows: Tensor, weight: float = 1.0, source: Tensor | None = None) -> None:
        """Take rows (n, d) of one weight, a chunk of them at a time in float64."""
        for some in rows.split(max(1, CHUNK // rows.shape[-1])):
            values = torch.linalg.vector_norm(some, dim=0, dtype=torch.float64).square() * weight
            self._counts = _Squares(values if self._counts is None else values + self._counts.values)


def _share_memory(rows: Tensor, source: Tensor) -> bool:
    return rows.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()

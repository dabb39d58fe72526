"""Second moments of the rows that one step tells about, until they enter a running average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rkfac.curvature.collected import Collected
from rkfac.curvature.summands import Diagonal, Elsewhere, Part, Rows, Seen, Squares, Sum, Total, unit
from rkfac.linalg import peak
from rkfac.linalg.symmetric import gram, strip_elements

CHUNK = 1 << 23  # elements of rows that are multiplied by their unit at once: 32 MB in float32
SMALL = 1 << 17  # elements of rows that are kept though their sum would take less: one product, later


class Moment(Collected[Part]):
    """sum w r r^T over the rows seen since the last step; moments add up, `add` takes more rows of one weight w.

    Rows are kept while they take no more memory than their sum (or little of it), and summed up from then on.
    """

    wants_rows = False  # whether rows are needed even where their sum is had faster without

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Rows] = []
        self._sum: Sum | None = None
        self._finished: Sum | None = None  # cut otherwise than sums of rows
        self._total: Total | Elsewhere | None = None  # in the place of all that was seen here
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
            self._kept.append(Rows(rows if owned else rows.clone(), weight))
            return
        kept, self._kept = self._kept, []
        for part in [*kept, Rows(rows, weight)]:
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
        self._sum = Sum(gram(rows * unit(largest), weight), largest)

    def add_finished(self, made: Callable[[Tensor], list[Tensor]], largest: Tensor) -> None:
        """Take a second moment made without rows, in strips; `largest` is the largest entry that rows would have had."""
        strips = made(unit(largest))
        if self._finished is None:
            self._finished = Sum(strips, largest)
        else:
            self._finished.join(strips, largest)

    @property
    def _parts(self) -> Sequence[Part]:
        return self._seen if self._total is None else [self._total]

    @property
    def _seen(self) -> list[Seen]:
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
        self._total = Total(strips, exponent)

    def left(self, trace: Tensor, exponent: int) -> None:
        """The same where another process keeps the sum."""
        self._total = Elsewhere(trace, exponent)

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
        self._counts: Diagonal | None = None

    def add(self, rows: Tensor, weight: float = 1.0, source: Tensor | None = None) -> None:
        """Take a diagonal (d,)."""
        values = rows if weight == 1.0 else rows * weight
        self._counts = Diagonal(values if self._counts is None else values + self._counts.values)

    @property
    def _seen(self) -> list[Seen]:
        return [] if self._counts is None else [self._counts]


class SquareMoment(DiagonalMoment):
    """The diagonal of sum w r r^T over rows of any kind: no matrix as wide as a vocabulary is ever formed."""

    def add(self, rows: Tensor, weight: float = 1.0, source: Tensor | None = None) -> None:
        """Take rows (n, d) of one weight, a chunk of them at a time in float64."""
        for some in rows.split(max(1, CHUNK // rows.shape[-1])):
            values = torch.linalg.vector_norm(some, dim=0, dtype=torch.float64).square() * weight
            self._counts = Squares(values if self._counts is None else values + self._counts.values)


def _share_memory(rows: Tensor, source: Tensor) -> bool:
    return rows.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()

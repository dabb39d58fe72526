"""The gradients that one step tells about sample by sample, until a block takes them.

As in a `Moment` everything is in units of powers of two near the largest entry, so that products of gradients of 1e-20 and
inputs of 1e+20 are numbers; the powers are plain integers once a step has read them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.curvature.collected import Collected
from rkfac.curvature.summands import unit
from rkfac.linalg import Formed, Outer, Rows, peak

FARTHEST = 480  # binary exponent of entries whose square float64 holds with room for their number


class Piece(ABC):
    """What one call (or several of one pass) adds: rows u_n of so many samples."""

    # Of about its largest gradient and input, once it has been settled: two, for samples may be mixed before a product.
    gradient_exponent = input_exponent = 0

    @property
    @abstractmethod
    def count(self) -> int:
        """Samples."""

    @abstractmethod
    def joined(self, other: Piece) -> Piece:
        """With more positions of the same samples."""

    @abstractmethod
    def formed(self) -> FormedPiece:
        """As rows."""

    @abstractmethod
    def readings(self) -> list[Tensor]:
        """Numbers the host must know."""

    @abstractmethod
    def settle(self, numbers: Sequence[float]) -> None:
        """Take what `readings` were."""

    @abstractmethod
    def in_units(self, gradient_exponent: int, input_exponent: int) -> Formed | Outer:
        """Gradients over 2^gradient_exponent, inputs over 2^input_exponent."""


@dataclass(eq=False)
class FormedPiece(Piece):
    """U (n, D), `unit` times too large; a float64 number on the device."""

    rows: Tensor
    shape: tuple[int, ...]
    unit: Tensor

    @property
    def count(self) -> int:
        """Its rows."""
        return len(self.rows)

    def joined(self, other: Piece) -> Piece:
        """Their sum, in the units of the larger one."""
        theirs = other.formed()
        unit = torch.minimum(self.unit, theirs.unit)
        own, more = ((unit / piece.unit).to(self.rows.dtype) for piece in (self, theirs))
        return FormedPiece(self.rows * own + theirs.rows * more, self.shape, unit)

    def formed(self) -> FormedPiece:
        """It is."""
        return self

    def readings(self) -> list[Tensor]:
        """Of the entries, and the unit."""
        return [*torch.aminmax(self.rows), self.unit]

    def settle(self, numbers: Sequence[float]) -> None:
        """The exponent of the largest entry."""
        self._unit = math.frexp(numbers[2])[1] - 1
        self.gradient_exponent = math.frexp(max(map(abs, numbers[:2])))[1] - self._unit

    def in_units(self, gradient_exponent: int, input_exponent: int) -> Formed:
        """The products over both."""
        return Formed(_scaled(self.rows, -self._unit - gradient_exponent - input_exponent), self.shape)


@dataclass(eq=False)
class OuterPiece(Piece):
    """G (c, n, s, d_G) and X (c, n, s, d_A) as they came."""

    rows: Tensor
    inputs: Tensor

    @property
    def count(self) -> int:
        """Samples."""
        return self.rows.shape[1]

    def joined(self, other: Piece) -> Piece:
        """Side by side, where both are products."""
        if isinstance(other, OuterPiece):
            return OuterPiece(torch.cat([self.rows, other.rows], 2), torch.cat([self.inputs, other.inputs], 2))
        return other.joined(self)

    def formed(self) -> FormedPiece:
        """In units of the largest entries, which are looked for on the device."""
        unit_G, unit_X = (unit_for(t) for t in (self.rows, self.inputs))
        made = Outer(self.rows * unit_G, self.inputs * unit_X).formed()
        return FormedPiece(made.U, made.shape, unit_G.double() * unit_X.double())

    def readings(self) -> list[Tensor]:
        """Of gradients and inputs."""
        return [*torch.aminmax(self.rows), *torch.aminmax(self.inputs)]

    def settle(self, numbers: Sequence[float]) -> None:
        """The exponents of the largest entries."""
        self.gradient_exponent, self.input_exponent = (
            math.frexp(max(map(abs, pair)))[1] for pair in (numbers[:2], numbers[2:])
        )

    def in_units(self, gradient_exponent: int, input_exponent: int) -> Outer:
        """Each side over its own."""
        return Outer(_scaled(self.rows, -gradient_exponent), _scaled(self.inputs, -input_exponent))


class Gathered(Collected[Piece]):
    """Rows u_n of the samples of one step; `Statistics` sets the scale of U^T U as it does a moment's."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[Piece] = []

    def add(self, piece: Piece, joins: bool) -> None:
        """More samples, or more positions of the last ones."""
        if joins:
            self._pieces[-1] = self._pieces[-1].joined(piece)
        else:
            self._pieces.append(piece)

    @property
    def _parts(self) -> list[Piece]:
        return self._pieces

    def _settled(self, numbers: Sequence[float]) -> bool:
        for piece, own in self._by_part(numbers):
            piece.settle(own)
        return sum(self._exponents()) < FARTHEST  # squares are finite, too

    def _exponents(self) -> tuple[int, int]:
        return max(part.gradient_exponent for part in self._parts), max(part.input_exponent for part in self._parts)

    def taken(self) -> tuple[Rows, float]:
        """All rows in units of about the largest one, and what their U^T U is multiplied by to be F."""
        gradient_exponent, input_exponent = self._exponents()
        gradient_exponent = max(gradient_exponent, -FARTHEST - input_exponent)  # gradients smaller than that are none
        size = self.scale * 4.0 ** (gradient_exponent + input_exponent)
        made = [part.in_units(gradient_exponent, input_exponent) for part in self._parts]
        products = [rows for rows in made if isinstance(rows, Outer)]
        if len(products) == len(made):
            return _side_by_side(products), size
        formed = [rows.formed() if isinstance(rows, Outer) else rows for rows in made]
        U = formed[0].U if len(formed) == 1 else torch.cat([rows.U for rows in formed])
        return Formed(U, formed[0].shape), size


def unit_for(t: Tensor) -> Tensor:
    """The power of two that brings the largest entry near one, on the device."""
    return unit(peak(t))


def _side_by_side(made: Sequence[Outer]) -> Outer:
    """Samples of all; those of fewer positions get some of zeros."""
    if len(made) == 1:
        return made[0]
    most = max(rows.G.shape[2] for rows in made)

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, 0, 0, most - t.shape[2]))

    return Outer(torch.cat([padded(rows.G) for rows in made], 1), torch.cat([padded(rows.X) for rows in made], 1))


def _scaled(t: Tensor, exponent: int) -> Tensor:
    """t * 2^exponent; in two steps, for the power itself may be none of its numbers."""
    half = exponent // 2
    return t * 2.0**half * 2.0 ** (exponent - half) if exponent else t

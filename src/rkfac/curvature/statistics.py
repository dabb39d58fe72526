"""What one step tells about a layer: second moments of rows, and how many samples and positions they stand for.

Everything that scales a statistic (what the loss averages over, positions, a gradient scaler) is undone here and nowhere
else. Rows are kept in units of a power of two near their largest entry, so that squares of gradients of 1e-20 and of
inputs of 1e+20 are still numbers; the powers themselves are plain integers once a step has read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rkfac.linalg import peak

WORTH_SPLITTING = 512  # columns below which one product is faster than four
# So that the unit itself is a number in the rows' precision, and its square one in float64.
LARGEST_EXPONENT = {torch.float32: 120, torch.float64: 480}


class Moment:
    """sum w r r^T over the rows seen since the last step; moments add up, `add` takes more rows of one weight w.

    Rows are kept as they are while they are smaller than the factor (then one fused product updates the average in
    place, and factored factors can take them as columns), and summed up into a matrix as soon as they are not. With
    `diagonal` rows are the diagonal itself and only added.
    """

    def __init__(self, diagonal: bool = False) -> None:
        self.diagonal = diagonal
        self.scale = 1.0  # what turns the sum into the factor, set by `Statistics.settle`
        self._parts: list[tuple[Tensor, Tensor]] = []  # rows or one matrix, in units of 2^exponent
        self._summed = diagonal
        self._count = 0
        self._exponents: list[int] = []
        self._dead = False

    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        """Take rows (..., n, d), or a diagonal (d,); rows that stand for others as well weigh more than one."""
        if self.diagonal:
            rows = rows if weight == 1.0 else rows * weight
            values = rows + self._parts[0][0] if self._parts else rows
            self._parts = [(values, rows.new_zeros(()))]
            return
        largest = LARGEST_EXPONENT[rows.dtype]
        exponent = torch.frexp(peak(rows)).exponent.clamp(-largest, largest).to(rows.dtype)
        self._count += rows.shape[-2]
        if not self._summed and self._count <= rows.shape[-1]:
            # A copy: the source may change in place before the step, as an input buffer used again or an output gradient
            # that autograd handed on as some parameter's .grad.
            part = rows * torch.exp2(-exponent)
            self._parts.append((part if weight == 1.0 else part.mul_(math.sqrt(weight)), exponent))
            return
        if not self._summed:
            kept, self._parts, self._summed = self._parts, [], True
            for part, own in kept:
                self._accumulate(part * torch.exp2(own), own, 1.0)  # they carry the root of their weight
        self._accumulate(rows, exponent, weight)

    def _accumulate(self, rows: Tensor, exponent: Tensor, weight: float) -> None:
        """Add weight * rows^T rows to the matrix, in the larger of the two units."""
        d = rows.shape[-1]
        if not self._parts:
            self._parts = [(rows.new_zeros(*rows.shape[:-2], d, d), exponent)]
        matrix, unit = self._parts[0]
        wider = torch.maximum(unit, exponent)
        matrix.mul_(torch.exp2(2 * (unit - wider)))
        add_gram(matrix, rows * torch.exp2(-wider), 1.0, weight)
        self._parts = [(matrix, wider)]

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._parts

    def readings(self) -> list[Tensor]:
        """Numbers the host must know before the moment can be used: peak and exponent of each part."""
        return [t.double() for part, exponent in self._parts for t in (peak(part), exponent)]

    def settle(self, numbers: list[float]) -> bool:
        """Take what `readings` were; whether everything is finite."""
        peaks, exponents = numbers[0::2], numbers[1::2]
        if not all(map(math.isfinite, peaks)):
            return False
        self._exponents = [int(e) for e in exponents]
        self._dead = not any(peaks)
        return True

    @property
    def level(self) -> float:
        """Binary logarithm of about the largest entry of the scaled moment; -inf when all rows were zero."""
        return -math.inf if self._dead else math.log2(self.scale) + 2 * max(self._exponents)

    def blend_into(self, value: Tensor, keep: float, take: float, exponent: int) -> None:
        """value <- keep * value + take * scale * moment, in place, the value being in units of 2^exponent."""
        if self._dead:
            value.mul_(keep)
            return
        for (part, _), own in zip(self._parts, self._exponents, strict=True):
            weight = take * self.scale * 2.0 ** (2 * own - exponent)
            if self._summed:
                matrix = part.to(value)
                if part.dtype != value.dtype and not self.diagonal:
                    matrix = (matrix + matrix.mT) / 2  # what is symmetric to float32 is not to float64
                value.mul_(keep).add_(matrix, alpha=weight)
            else:
                add_gram(value, part.to(value), keep, weight)
            keep = 1.0


def add_gram(matrix: Tensor, rows: Tensor, keep: float, take: float) -> None:
    """matrix <- keep * matrix + take * rows^T rows, in place, the matrix being symmetric.

    torch has no symmetric rank-n update; only the blocks on and above the diagonal are multiplied, the others mirrored,
    which saves three eighths of the flops of a full product.
    """
    d = rows.shape[-1]
    if matrix.ndim > 2:
        matrix.baddbmm_(rows.mT, rows, beta=keep, alpha=take)
        return
    if d < WORTH_SPLITTING:
        matrix.addmm_(rows.mT, rows, beta=keep, alpha=take)
        return
    edges = [d * i // 4 for i in range(5)]
    for begin, end in pairwise(edges):
        matrix[begin:end, begin:].addmm_(rows[:, begin:end].mT, rows[:, begin:], beta=keep, alpha=take)
    for begin, end in pairwise(edges):
        matrix[end:, begin:end] = matrix[begin:end, end:].mT


@dataclass(eq=False)
class Statistics:
    """The moments of one layer since the last step (inputs first, gradients last) and what they stand for."""

    moments: tuple[Moment, ...]
    calls: int = 0
    rows: int = 0
    tokens: int = 0
    _terms: dict[Any, int] = field(default_factory=dict)  # of the loss, by pass

    @property
    def empty(self) -> bool:
        """Whether no row came in."""
        return self.rows == 0

    def count(self, one_pass: Any, terms: int, rows: int, tokens: int) -> None:
        """One more call of the layer: calls within a pass are positions, calls in another are more samples."""
        self._terms[one_pass] = terms
        self.calls += 1
        self.rows += rows
        self.tokens += tokens

    def samples(self, loss_average: str) -> int:
        """N: how many terms the loss averages over."""
        if loss_average == "tokens":
            return self.tokens  # not rows: those of norms and of weight_sharing="reduce" are whole samples
        return sum(self._terms.values())

    def settle(self, numbers: list[float], loss_average: str, sampled: bool, loss_scale: float, summed: bool) -> bool:
        """Read the peaks and set all scales; False when something is not finite.

        With N samples and S positions a sample, A = sum a a^T / (N S^2) and G = S / N sum g^ g^^T, where g^ is the
        gradient of one sample's loss: N g for a loss averaged over the batch, g for a summed one. Their product is the
        KFC block; the split of S^2 between the two is the paper's. `summed`: positions are summed inside a row already.
        """
        for moment in self.moments:
            cut = len(moment.readings())
            if not moment.settle(numbers[:cut]):
                return False
            numbers = numbers[cut:]
        samples = self.samples(loss_average)
        positions = 1.0 if summed else self.rows / samples
        own = loss_average == "sum" or sampled
        gradients = positions / samples if own else positions * samples
        if not sampled:
            gradients /= loss_scale**2
        *inputs, output = self.moments
        output.scale = gradients
        for moment in inputs:
            moment.scale = 1 / (samples * positions**2)
        return True

    def readings(self) -> list[Tensor]:
        """All numbers the host must read, in the order `settle` takes them."""
        return [t for moment in self.moments for t in moment.readings()]

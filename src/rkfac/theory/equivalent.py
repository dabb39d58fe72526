"""The deterministic equivalent of a weighted sum of outer products: how many of its eigenvalues lie above a number.

For X = sum_k tau_k x_k x_k^T with independent rows x_k of covariance C (eigenvalues c_i) and z in the upper half-plane

    b = sum_k tau_k / (1 + tau_k e),    e = sum_i c_i / (b c_i - z),    (X - z)^-1 ~ (b C - z)^-1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ETA = 1e-8  # z = x (1 + i ETA) stands for x + i 0: an edge of the spectrum is blurred by about this share
EXACT = 1e-8  # Newton's last step, beside its value; what is left after it is the square of that
STRIDE = 0.03  # by which the imaginary part falls at a time, where Newton can follow
MANY = 10**12  # rows of a batch; more of them are as good as infinitely many, and 1 / n is lost beside 1
AT_ONCE = 1 << 18  # numbers of a matrix (points, eigenvalues) that are worked on together
ALIKE = 1 / 512  # eigenvalues of C in one cell of this logarithmic width become their mean
BATCHES_ALIKE = 1 / 32  # so do weights, which are nowhere seen one by one


@dataclass(frozen=True)
class Weights:
    """Weights tau of the rows with how many rows have each, and the sum of those too small to be told from an average."""

    tau: Tensor
    rows: Tensor
    rest: float

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.tau @ self.rows) + self.rest


def weights_of(rho: float, n: int, updates: int | None, unbiased: bool, smallest: float) -> Weights:
    """(1 - rho) rho^j / n for the n rows of each batch j, those of rho^j < smallest as one rest."""
    n = min(n, MANY)
    pace = -math.log(rho) if rho > 0 else math.inf
    seen = math.inf if updates is None else updates
    told = min(seen, math.ceil(-math.log(smallest) / pace) + 1)
    together = max(1, math.floor(BATCHES_ALIKE / pace))
    first = torch.arange(0, told, together, dtype=torch.float64)
    batches = (told - first).clamp(max=together)
    scale = -math.expm1(-pace * seen) if unbiased else 1.0
    before = torch.exp(-pace * first) if rho > 0 else torch.ones_like(first)
    share = -before * torch.expm1(-pace * batches) / scale
    rest = (math.exp(-pace * told) - math.exp(-pace * seen)) / scale if told < seen else 0.0
    return Weights(share / (n * batches), n * batches, rest)


def grouped(values: Tensor) -> tuple[Tensor, Tensor]:
    """Positive numbers in descending order as (means of those nearly alike, how many each stands for)."""
    cells = torch.floor(values.log() / ALIKE)
    _, counts = torch.unique_consecutive(cells, return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    exact = torch.where(counts == 1, values[starts[:-1]], (sums[starts[1:]] - sums[starts[:-1]]) / counts)
    return exact, counts.to(values.dtype)


class Equivalent:
    """Counts eigenvalues of X; `c` are the positive eigenvalues of C, the largest 1, `counts` how often each is there."""

    def __init__(self, c: Tensor, counts: Tensor, weights: Weights) -> None:
        self.c, self.counts, self.weights = c, counts, weights
        largest, trace, peak = float(c.max()), float(c @ counts), float(weights.tau.max())
        # the largest eigenvalue: at least that of the mean or of the heaviest row, at most what Chevet's inequality says
        self.least = 0.5 * max(largest * weights.total, peak * trace)
        self.most = 1.01 * (math.sqrt(largest * weights.total) + math.sqrt(peak * trace)) ** 2

    def above(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For every x: how many eigenvalues are expected above it, and minus their number per unit of log x.

        log det(X - z) ~ sum_i log(b c_i - z) + sum_k log(1 + tau_k e) - b e, stationary in b and e; with the imaginary
        part of z going to 0 its argument is -pi for each eigenvalue below x.
        """
        step = max(1, AT_ONCE // (len(self.c) + len(self.weights.tau)))
        found = [self._above(piece) for piece in x.split(step)]
        return torch.cat([count for count, _ in found]), torch.cat([slope for _, slope in found])

    def _above(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(x, x * ETA)
        e = self._solve(x)
        e = torch.complex(e.real, e.imag.clamp(min=0))  # rounding must not take logarithms across their cut
        b = self._b(e)[0]
        away = z[:, None] - b[:, None] * self.c
        rows = torch.angle(1 + e[:, None] * self.weights.tau) @ self.weights.rows + self.weights.rest * e.imag
        slope = x * ((1 / away) @ self.counts.to(e.dtype)) / math.pi
        count = (torch.angle(away) @ self.counts + rows - (b * e).imag) / math.pi
        # what the imaginary part of z adds, to first order: ETA / pi for each eigenvalue far below x, zeros among them
        return count - ETA * slope.real, slope.imag

    def _b(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """B for this e, and its derivative."""
        share = self.weights.tau / (1 + e[:, None] * self.weights.tau)
        rows = self.weights.rows.to(e.dtype)
        return share @ rows + self.weights.rest, -(share.square() @ rows)

    def _mapped(self, e: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the two equations make of e, the derivative of that, and b."""
        b, slope = self._b(e)
        share = self.c / (b[:, None] * self.c - z[:, None])
        counts = self.counts.to(e.dtype)
        return share @ counts, -(share.square() @ counts) * slope, b

    def _newton(self, e: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Newton's method from e, and where it arrived at the solution: the one with e and -b / z in the upper half-plane."""
        for _ in range(12):
            mapped, slope, b = self._mapped(e, z)
            change = (mapped - e) / (1 - slope)
            e = e + change
            arrived = change.abs() <= EXACT * e.abs()
            if bool(arrived.all()):
                break
        other = -b / z
        right = (e.imag > -1e-13 * e.abs()) & (other.imag > -1e-13 * other.abs())
        return e, arrived & right

    def _solve(self, x: Tensor) -> Tensor:
        """E at z = x (1 + i ETA): from x (1 + i), else from an imaginary part beyond the whole spectrum, where it is simple."""
        e, right = self._descend(x, x.clone(), 8)
        if not bool(right.all()):
            e[~right], found = self._descend(x[~right], torch.full_like(x[~right], self.most), 50)
            if not bool(found.all()):
                raise ArithmeticError("the equations of the expected spectrum could not be solved")
        return e

    def _descend(self, x: Tensor, y: Tensor, warming: int) -> tuple[Tensor, Tensor]:
        """E at z = x (1 + i ETA) by continuation in the imaginary part from y on, and where that was found."""
        z, least, factor = torch.complex(x, y), x * ETA, torch.full_like(x, STRIDE)
        e = -float(self.c @ self.counts) / z
        for _ in range(warming):  # maps the upper half-plane into itself, and contracts there
            e = self._mapped(e, z)[0]
        there, right = self._newton(e, z)
        e = torch.where(right, there, e)
        waiting = right.nonzero()[:, 0]
        while len(waiting):
            near = torch.maximum(y[waiting] * factor[waiting], least[waiting])
            there, found = self._newton(e[waiting], torch.complex(x[waiting], near))
            moved, stuck = waiting[found], waiting[~found]
            e[moved], y[moved] = there[found], near[found]
            factor[moved] = factor[moved].square().clamp(min=STRIDE)
            factor[stuck] = factor[stuck].sqrt()
            waiting = waiting[(y[waiting] > least[waiting]) & (factor[waiting] < 1 - 1e-4)]
        return e, y <= least

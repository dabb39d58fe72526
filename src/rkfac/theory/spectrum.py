"""The eigenvalues that are to be expected of an exponentially averaged Kronecker factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rkfac.theory.equivalent import Equivalent, grouped, weights_of

Start = Literal["unbiased", "identity"]

FLOOR = 1e-15  # eigenvalues below this share of the largest are called zero, as they are by float64's own rounding
ROUNDING = 1e-5  # how far below zero, beside the largest, rounding may have left eigenvalues of a covariance
MARGIN = 1e-3  # batches are told apart as long as their weight is above this share of the smallest number asked for
COARSE, FINE = 0.2, 1e-3  # steps in log x: to begin with, and where an eigenvalue is located well enough


def effective_samples(rho: float = 0.95, n: int = 256) -> float:
    """Rows of an evenly weighted mean with the same variance as the running one: n (1 + rho) / (1 - rho).

    `rho` is the decay of the average, at least 0 and below 1, `n` the rows that a batch adds.
    """
    _check(rho, n)
    return n * (1 + rho) / (1 - rho)


def expected_spectrum(
    covariance: Tensor | Sequence[float],
    rho: float = 0.95,
    n: int = 256,
    updates: int | None = None,
    start: Start = "unbiased",
) -> Tensor:
    """Expected eigenvalues of a running average of n rows a batch: those above which 1/2, 3/2, ..., d - 1/2 are expected.

    The average is sum_j (1 - rho) rho^j 1/n sum_k x_jk x_jk^T over batches j = 0, 1, ... back in time; rows are independent.

    `covariance`: the d eigenvalues of E[x x^T], in any order; zeros are allowed. `rho`: the decay, at least 0 and below 1.
    `n`: the rows that a batch adds. `updates`: how many batches the average has seen (None: infinitely many). `start`: what
    it began with: nothing, and is divided by 1 - rho^updates ("unbiased"), or the identity, of which rho^updates is left
    ("identity").

    In descending order, float64 on the CPU; what lies below 1e-15 of the largest is 0. O(d) for each of some hundred points:
    a second at d = 4609, several where n is so large that eigenvalues stand apart from each other.
    """
    model = _Model(covariance, rho, n, updates, start, FLOOR)
    return model.spectrum() * model.unit + model.shift


def expected_modes(
    covariance: Tensor | Sequence[float],
    rho: float = 0.95,
    n: int = 256,
    epsilon: float = 0.03,
    updates: int | None = None,
    start: Start = "unbiased",
) -> float:
    """How many eigenvalues of a running average are expected above epsilon * lambda_max: a mean, so not a whole number.

    `epsilon` lies strictly between 0 and 1; the other arguments are those of `expected_spectrum`, lambda_max is the first
    number that it returns. At least 1, the largest itself. O(d) for each of some hundred points: a fraction of a second.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must lie strictly between 0 and 1, got {epsilon}")
    model = _Model(covariance, rho, n, updates, start, max(epsilon, FLOOR))
    shift = model.shift / model.unit
    threshold = epsilon * (model.largest() + shift) - shift
    if threshold <= 0:
        return float(model.d)
    return max(1.0, min(float(model.above(threshold)), float(model.rank)))


class _Model:
    """What was asked for, checked, in units of C's largest eigenvalue and without what is left of the identity."""

    def __init__(
        self,
        covariance: Tensor | Sequence[float],
        rho: float,
        n: int,
        updates: int | None,
        start: Start,
        smallest: float,
    ) -> None:
        _check(rho, n)
        if updates is not None and updates < 1:
            raise ValueError(f"updates must be positive, or None for infinitely many, got {updates}")
        if start not in ("unbiased", "identity"):
            raise ValueError(f'start must be "unbiased" or "identity", got {start!r}')
        values = _eigenvalues(covariance)
        self.d = len(values)
        self.unit = float(values[0])
        positive = values[values > 0] / self.unit
        positive = positive[positive > 0]  # some may have been rounded to zero only now
        self.rank = len(positive) if updates is None else min(len(positive), n * updates)
        self.shift = rho**updates if start == "identity" and updates is not None else 0.0
        weights = weights_of(rho, n, updates, start == "unbiased", smallest * MARGIN)
        self.equivalent = Equivalent(*grouped(positive), weights)

    def above(self, x: float) -> float:
        """How many eigenvalues are expected above x."""
        return float(self.equivalent.above(torch.tensor([x], dtype=torch.float64))[0])

    def largest(self) -> float:
        """The number above which half an eigenvalue is expected."""
        low, high = math.log(self.equivalent.least), math.log(self.equivalent.most)
        for _ in range(4):
            points = torch.linspace(low, high, 18, dtype=torch.float64)
            enough = self.equivalent.above(points.exp())[0] >= 0.5
            last = max(0, min(int(enough.sum()) - 1, len(points) - 2))
            low, high = float(points[last]), float(points[last + 1])
        return math.exp((low + high) / 2)

    def spectrum(self) -> Tensor:
        """All d of them: a grid in log x, halved where a cubic between its points does not foresee the count."""
        low, high = math.log(self.equivalent.least * FLOOR), math.log(self.equivalent.most)
        t = torch.linspace(low, high, math.ceil((high - low) / COARSE) + 1, dtype=torch.float64)
        count, slope = self.equivalent.above(t.exp())
        unsure = torch.ones(len(t) - 1, dtype=torch.bool)
        while True:
            asked = (count[:-1] + 0.5).floor() > (count[1:] + 0.5).floor()  # is there some k - 1/2 in between?
            left = (unsure & asked & (t.diff() > FINE)).nonzero()[:, 0]
            if len(left) == 0:
                break
            middle = (t[left] + t[left + 1]) / 2
            found, its_slope = self.equivalent.above(middle.exp())
            share, width = torch.full_like(middle, 0.5), t[left + 1] - t[left]
            value, its = _between(share, t, count, slope, left)
            # two lone eigenvalues on both sides of the middle keep its count, but not its slope
            wrong = torch.maximum((found - value).abs(), 0.1 * width * (its_slope - its).abs())
            unsure[left] = wrong > 0.05 + 5e-4 * found
            unsure = torch.cat([unsure, unsure[left]])
            order = torch.cat([t, middle]).argsort()
            # a half comes right after the interval it was cut from
            unsure = unsure[torch.cat([torch.arange(len(t) - 1, dtype=torch.float64), left + 0.5]).argsort()]
            t, count, slope = (torch.cat(both)[order] for both in ((t, middle), (count, found), (slope, its_slope)))
        return self._located(t, count, slope)

    def _located(self, t: Tensor, count: Tensor, slope: Tensor) -> Tensor:
        count = count.flip(0).cummax(0).values.flip(0)  # rounding apart it falls everywhere
        wanted = torch.arange(1, self.rank + 1, dtype=torch.float64) - 0.5
        wanted = wanted[wanted < count[0]]
        left = (torch.searchsorted(-count, -wanted, right=True) - 1).clamp(0, len(t) - 2)
        low, high = torch.zeros_like(wanted), torch.ones_like(wanted)
        for _ in range(40):
            middle = (low + high) / 2
            more = _between(middle, t, count, slope, left)[0] > wanted
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        values = torch.zeros(self.d, dtype=torch.float64)
        values[: len(wanted)] = (t[left] + low * (t[left + 1] - t[left])).exp()
        return values


def _between(share: Tensor, t: Tensor, value: Tensor, slope: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Hermite's cubic on [t[left], t[left + 1]] and its slope; those at the ends are bounded so that it falls throughout."""
    width, first, last = t[left + 1] - t[left], value[left], value[left + 1]
    fall = last - first
    begin, end = (torch.maximum(slope[side] * width, 3 * fall).clamp(max=0) for side in (left, left + 1))
    square, cube = 3 * fall - 2 * begin - end, begin + end - 2 * fall
    curve = first + share * (begin + share * (square + share * cube))
    return curve, (begin + share * (2 * square + 3 * share * cube)) / width


def _check(rho: float, n: int) -> None:
    if not 0 <= rho < 1:
        raise ValueError(f"rho must be at least 0 and below 1, got {rho}")
    if n < 1:
        raise ValueError(f"n must be positive, got {n}")


def _eigenvalues(covariance: Tensor | Sequence[float]) -> Tensor:
    """The eigenvalues of C in descending order, float64."""
    values = torch.as_tensor(covariance, dtype=torch.float64, device="cpu").detach()
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(
            "covariance must be the eigenvalues of a covariance, a vector of at least one number "
            f"(torch.linalg.eigvalsh of a matrix), got shape {tuple(values.shape)}"
        )
    if not bool(values.isfinite().all()):
        raise ValueError("covariance must be finite, got nan or infinity among its eigenvalues")
    values = values.sort(descending=True).values
    if values[0] <= 0 or values[-1] < -ROUNDING * values[0]:
        raise ValueError(
            "eigenvalues of a covariance must not be negative (beyond rounding) and not all zero, "
            f"got {float(values[-1]):g} to {float(values[0]):g}"
        )
    return values.clamp(min=0)

"""Reference B-KFAC and SKFAC in plain NumPy (float64), on the network and the statistics of `numpy_kfac`.

B-KFAC: what Brand's update keeps is the truncated eigendecomposition of the decayed truncation plus the new outer products,
formed here as a matrix. SKFAC: the average of columns and Woodbury's inverse of their square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oracles.numpy_kfac import (
    Array,
    LayerStatistics,
    Parameters,
    clip_rms,
    exact_eigenpairs,
    loss_and_statistics,
    parameter_matrix,
    split_matrix,
)


def columns(statistics: LayerStatistics, reduce: bool) -> tuple[Array, Array]:
    """Scaled columns (d, n) of both sides, whose squares are the batch's factors A and Gamma."""
    inputs, gradients = statistics.inputs, statistics.output_gradients
    if reduce:
        inputs, gradients = inputs.mean(1, keepdims=True), gradients.sum(1, keepdims=True)
    samples, positions = inputs.shape[:2]
    flat_inputs, flat_gradients = (t.reshape(samples * positions, -1).T for t in (inputs, gradients))
    return flat_inputs / (positions * np.sqrt(samples)), flat_gradients * np.sqrt(samples * positions)


class Online:
    """A factor of B-KFAC from the identity on: truncated where rank + columns < d at first, the whole average elsewhere.

    `tail` "trace" puts the mean of what was cut in the place of the modes that are not kept; `overwrite_every`: so many
    refreshes apart, from the first on, the average itself takes the place of what is kept of it ("b-r"); `correct_every`:
    so many statistics apart, `correct_share` of the kept modes and one more are turned among themselves to those of the
    average ("b-r-c"). Which: the first ones of `draw(modes)`, a permutation.
    """

    def __init__(
        self,
        size: int,
        rho: float,
        rank: int,
        tail: str = "zero",
        overwrite_every: int | None = None,
        correct_every: int | None = None,
        correct_share: float = 0.2,
        draw: Callable[[int], Array] = np.arange,
    ) -> None:
        self.rho, self.rank, self.size, self.tail, self.every = rho, rank, size, tail, overwrite_every
        self.correct_every, self.correct_share, self.draw = correct_every, correct_share, draw
        self.kept, self.average = np.zeros((size, size)), np.zeros((size, size))
        self.identity, self.truncates, self.refreshes, self.statistics = 1.0, None, 0, 0

    def take(self, new: Array) -> None:
        if self.truncates is None:
            self.truncates = self.rank + new.shape[1] < self.size
        self.average = self.rho * self.average + (1 - self.rho) * new @ new.T
        self.kept = self.rho * self.kept + (1 - self.rho) * new @ new.T
        self.identity *= self.rho
        if self.truncates:
            values, vectors = np.linalg.eigh(self.kept)
            vectors = vectors[:, -self.rank :]
            self.kept = vectors @ np.diag(values[-self.rank :]) @ vectors.T
        self.statistics += 1
        if self.truncates and self.correct_every is not None and self.statistics % self.correct_every == 0:
            self.correct()

    def correct(self) -> None:
        """The average seen in the span of some of the kept modes takes the place of what is kept there."""
        values, vectors = np.linalg.eigh(self.kept)
        modes = min(self.rank, int((values > 1e-12 * values[-1]).sum()))  # there are fewer at first
        U, values = vectors[:, ::-1][:, :modes], values[::-1][:modes]
        chosen = self.draw(modes)[: min(modes, round(self.correct_share * modes + 1))]
        others = np.setdiff1d(np.arange(modes), chosen)
        inside = U[:, chosen] @ U[:, chosen].T
        self.kept = inside @ self.average @ inside + U[:, others] @ np.diag(values[others]) @ U[:, others].T

    def refresh(self) -> None:
        overwritten = self.every is not None and self.refreshes % self.every == 0
        if overwritten or not self.truncates:
            self.kept = self.average
        pairs = exact_eigenpairs(self.kept, None if overwritten or not self.truncates else self.rank)
        rest = self.size - len(pairs.values)
        mean = (np.trace(self.average) - pairs.values.sum()) / rest + self.identity if rest else 0.0
        self.below = mean if self.tail == "trace" else 0.0
        self.pairs = pairs._replace(values=pairs.values + self.identity)
        self.refreshes += 1

    def solve(self, kappa: float, matrix: Array) -> Array:
        """Kept modes have their eigenvalues, all others have one."""
        U, values = self.pairs
        damping = kappa * values.max()
        inside = U @ (U.T @ matrix / (values + damping)[:, None])
        return inside + (matrix - U @ (U.T @ matrix)) / (self.below + damping)


class Columns:
    """A factor of SKFAC, free of its start; slots that a batch has none for only decay."""

    def __init__(self, size: int, rho: float, rank: int, **nothing: Any) -> None:
        self.rho, self.weight, self.columns = rho, 0.0, np.zeros((size, 0))

    def take(self, new: Array) -> None:
        past = self.rho * self.weight
        self.weight = past + 1 - self.rho
        slots = max(new.shape[1], self.columns.shape[1])
        old, new = (np.pad(c, ((0, 0), (0, slots - c.shape[1]))) for c in (self.columns, new))
        self.columns = (past * old + (1 - self.rho) * new) / self.weight

    def refresh(self) -> None:
        self.used = self.columns.copy()

    def solve(self, kappa: float, matrix: Array) -> Array:
        C = self.used
        damping = kappa * np.linalg.norm(C, 2) ** 2
        small = damping * np.eye(C.shape[1]) + C.T @ C
        return (matrix - C @ np.linalg.solve(small, C.T @ matrix)) / damping


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    kind: type[Online] | type[Columns],
    reduce: bool,
    learning_rate: float,
    kappa: float,
    rho: float,
    factor_period: int,
    inverse_period: int,
    rank: int,
    clip: float,
    **method: Any,
) -> tuple[list[Parameters], list[float]]:
    """One step per batch; returns the parameters after each step and each step's loss before it."""
    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    sizes = [parameter_matrix(weight, bias).shape for weight, bias in parameters]
    factors = [(kind(d_A, rho, rank, **method), kind(d_G, rho, rank, **method)) for d_G, d_A in sizes]
    history, losses = [], []
    for step, (images, labels) in enumerate(batches):
        loss, statistics = loss_and_statistics(parameters, images, labels)
        if step % factor_period == 0:
            for pair, layer in zip(factors, statistics, strict=True):
                for factor, new in zip(pair, columns(layer, reduce), strict=True):
                    factor.take(new)
        if step % inverse_period == 0:
            for factor in (factor for pair in factors for factor in pair):
                factor.refresh()
        updated = []
        for (weight, bias), layer, (A, G) in zip(parameters, statistics, factors, strict=True):
            direction = clip_rms(G.solve(kappa, A.solve(kappa, layer.gradient.T).T), clip)
            updated.append(split_matrix(parameter_matrix(weight, bias) - learning_rate * direction, weight.shape))
        parameters = updated
        history.append(parameters)
        losses.append(loss)
    return history, losses

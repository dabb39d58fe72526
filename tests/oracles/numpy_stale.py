"""Reference K-FAC and RS-KFAC with stale statistics in plain NumPy (float64), on the network of `numpy_kfac`.

Every layer is looked at when its interval is over: its statistics enter its averages, and both are decomposed. What is used of
a factor is a dense matrix, kept modes and what stands for the others alike, and matrices are what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oracles.numpy_kfac import (
    Array,
    Draw,
    Parameters,
    clip_rms,
    decompose,
    k_factors,
    loss_and_statistics,
    parameter_matrix,
    split_matrix,
)


def distance(X: Array, Y: Array) -> float:
    return float(np.linalg.norm(X - Y) / np.linalg.norm(Y))


class Layer:
    """Averages of both sides, what is used of them, and when the layer is looked at next."""

    def __init__(self, sizes: tuple[int, int], from_identity: bool) -> None:
        self.averages = [np.eye(size) if from_identity else np.zeros((size, size)) for size in sizes]
        self.weight = float(from_identity)  # of what the averages began with
        self.last, self.due, self.intervals = -1, 0, [1]  # of this and all earlier looks
        self.looks: list[list[Array]] = []

    def take(self, step: int, new: Sequence[Array], rho: float, period: int) -> None:
        keep = rho ** ((step - self.last) / period)
        total = keep * self.weight + 1 - keep
        for side, fresh in enumerate(new):
            self.averages[side] = (keep * self.weight * self.averages[side] + (1 - keep) * fresh) / total
        self.weight, self.last = total, step

    def look(self, used: list[Array], threshold: float) -> None:
        """The last two looks decide after how many steps the next one is."""
        away = [max(map(distance, used, then)) for then in self.looks[:-3:-1]]  # the younger one first
        if away and away[0] >= threshold:
            interval = max(1, self.intervals[-1] // 2)
        elif len(away) < 2 or away[1] >= threshold:
            interval = self.intervals[-1]
        else:
            interval = sum(self.intervals[-2:])
        self.looks.append(used)
        self.intervals.append(interval)
        self.due = self.last + interval


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    threshold: float,
    method: str,
    draw: Draw,
    measure: str,
    tail: str,
    from_identity: bool,
    learning_rate: float,
    kappa: float,
    rho: float,
    factor_period: int,
    rank: int,
    oversampling: int,
    power_iterations: int,
    clip: float,
) -> tuple[list[Parameters], list[float], list[list[int]]]:
    """Parameters after each step, each step's loss before it, and the intervals after all looks of each layer."""
    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    layers = [Layer(parameter_matrix(*pair).shape[::-1], from_identity) for pair in parameters]
    sizes = {"rank": rank, "oversampling": oversampling, "power_iterations": power_iterations}
    history, losses = [], []
    damped: list[list[Array]] = [[] for _ in layers]
    for step, (images, labels) in enumerate(batches):
        loss, statistics = loss_and_statistics(parameters, images, labels)
        for index, (layer, now) in enumerate(zip(layers, statistics, strict=True)):
            if step < layer.due:
                continue
            layer.take(step, k_factors(now), rho, factor_period)
            used, damped[index] = [], []
            for X in layer.averages:
                (U, values), one = decompose(X, method, draw=draw, **sizes), np.eye(len(X))
                rest = len(X) - len(values)
                below = (np.trace(X) - values.sum()) / rest if rest and tail == "trace" else 0.0
                used.append(U @ np.diag(values) @ U.T + below * (one - U @ U.T))
                damping = kappa * (values.max() if measure == "largest" else np.trace(X) / len(X))
                damped[index].append(used[-1] + damping * one)
            layer.look(used, threshold)
        updated = []
        for (weight, bias), now, (A, G) in zip(parameters, statistics, damped, strict=True):
            direction = clip_rms(np.linalg.solve(A, np.linalg.solve(G, now.gradient).T).T, clip)
            updated.append(split_matrix(parameter_matrix(weight, bias) - learning_rate * direction, weight.shape))
        parameters = updated
        history.append(parameters)
        losses.append(loss)
    return history, losses, [layer.intervals for layer in layers]

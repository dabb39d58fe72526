"""Reference EK-FAC in plain NumPy (float64) on the network of `numpy_kfac`, in completed bases: nothing is thin.

A basis of r kept modes is completed by any orthonormal others; second moments are a dG x dA matrix of one number a coordinate,
averaged over all coordinates that a truncated method cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oracles import numpy_kfac as kfac
from oracles.numpy_kfac import Array, Draw, LayerStatistics, Parameters


class Basis(NamedTuple):
    """All of space, the kept modes first; eigenvalues of discarded modes are zero."""

    Q: Array
    values: Array
    rank: int


def completed(pairs: kfac.Eigenpairs) -> Basis:
    U, rank, size = pairs.vectors, pairs.vectors.shape[1], len(pairs.vectors)
    rest = np.linalg.svd(np.eye(size) - U @ U.T)[0][:, : size - rank]
    return Basis(np.concatenate([U, rest], axis=1), np.concatenate([pairs.values, np.zeros(size - rank)]), rank)


def pooled(squares: Array, output: Basis, input_: Basis) -> Array:
    """One number for all coordinates of a block with a discarded side."""
    out = squares.copy()
    r, s = output.rank, input_.rank
    if s < squares.shape[1]:
        out[:r, s:] = squares[:r, s:].mean(axis=1, keepdims=True)
    if r < squares.shape[0]:
        out[r:, :s] = squares[r:, :s].mean(axis=0, keepdims=True)
    if r < squares.shape[0] and s < squares.shape[1]:
        out[r:, s:] = squares[r:, s:].mean()
    return out


def of_samples(layer: LayerStatistics, output: Basis, input_: Basis) -> Array:
    """mean over samples of (Q_G^T grad_n Q_A)^2, the gradients being those of one sample's loss."""
    samples = len(layer.inputs)
    total = np.zeros((len(output.Q), len(input_.Q)))
    for n in range(samples):
        own = samples * layer.output_gradients[n].T @ layer.inputs[n]
        total += (output.Q.T @ own @ input_.Q) ** 2 / samples
    return pooled(total, output, input_)


def of_gradient(layer: LayerStatistics, output: Basis, input_: Basis, samples: int) -> Array:
    return pooled(samples * (output.Q.T @ layer.gradient @ input_.Q) ** 2, output, input_)


def carried(M: Array, old: tuple[Basis, Basis], new: tuple[Basis, Basis]) -> Array:
    """Squared overlaps of all modes."""
    left, right = ((b.Q.T @ a.Q) ** 2 for a, b in zip(old, new, strict=True))
    return pooled(left @ M @ right.T, *new)


class Average:
    """sum of weighted terms over the sum of their weights; a start of weight zero is gone with the first term."""

    def __init__(self, start: Array, weight: float) -> None:
        self.M, self.weight = start, weight

    def take(self, new: Array, decay: float) -> None:
        total = decay * self.weight + (1 - decay)
        self.M = (decay * self.weight * self.M + (1 - decay) * new) / total
        self.weight = total


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    method: str,
    moments: str,
    carry: bool,
    moment_decay: float,
    measure: str | None,
    power: float,
    learning_rate: float,
    damping: float,
    rho: float,
    factor_period: int,
    inverse_period: int,
    rank: int,
    oversampling: int,
    power_iterations: int,
    draw: Draw,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
) -> list[Parameters]:
    """One step a batch; parameters after each. `betas`: AdamW's first moment is preconditioned, at AdamW's length."""
    parameters = [(w.copy(), b.copy()) for w, b in parameters]
    layers = range(len(parameters))
    factors: list[list[Array]] = [[] for _ in layers]
    weight = 0.0
    known: list[tuple[Basis, Basis] | None] = [None for _ in layers]
    held: list[Average | None] = [None for _ in layers]
    first = [np.zeros_like(kfac.parameter_matrix(w, b)) for w, b in parameters]
    second = [np.zeros_like(m) for m in first]
    samples, history = 0, []

    for step, (images, labels) in enumerate(batches):
        _, statistics = kfac.loss_and_statistics(parameters, images, labels, activation="tanh")
        if step % factor_period == 0:
            samples = len(images)
            total = rho * weight + (1 - rho)
            for k, layer in enumerate(statistics):
                if moments == "samples" and known[k] is not None:
                    held[k].take(of_samples(layer, *known[k]), rho)
                fresh = kfac.k_factors(layer)
                old = factors[k] or [np.zeros_like(f) for f in fresh]
                factors[k] = [(rho * weight * o + (1 - rho) * f) / total for o, f in zip(old, fresh, strict=True)]
            weight = total
        if step % inverse_period == 0:
            sizes = {"rank": rank, "oversampling": oversampling, "power_iterations": power_iterations}
            for k in layers:
                pairs = [kfac.decompose(f, method, draw=draw, **sizes) for f in factors[k]]
                new = completed(pairs[1]), completed(pairs[0])
                if known[k] is not None and carry:
                    held[k].M = carried(held[k].M, known[k], new)
                else:
                    product = pooled(np.outer(new[0].values, new[1].values), *new)
                    held[k] = Average(product, 0.0 if carry else 1.0)
                known[k] = new
        updated = []
        for k, (layer, (w, b)) in enumerate(zip(statistics, parameters, strict=True)):
            output, input_ = known[k]
            if moments == "running":
                held[k].take(of_gradient(layer, output, input_, samples), moment_decay)
            M = held[k].M
            unit = {"mean": M.mean(), "largest": M[: output.rank, : input_.rank].max(), None: 1.0}[measure]
            J, length = layer.gradient, None
            if betas is not None:
                first[k] = betas[0] * first[k] + (1 - betas[0]) * J
                second[k] = betas[1] * second[k] + (1 - betas[1]) * J**2
                root = np.sqrt(second[k] / (1 - betas[1] ** (step + 1))) + eps
                length = np.linalg.norm(first[k] / (1 - betas[0] ** (step + 1)) / root)
                J = first[k]
            S = output.Q @ ((output.Q.T @ J @ input_.Q) * (M + damping * unit) ** power) @ input_.Q.T
            if length is not None:
                S = S * length / np.linalg.norm(S)
            updated.append(kfac.split_matrix(kfac.parameter_matrix(w, b) - learning_rate * S, w.shape))
        parameters = updated
        history.append(parameters)
    return history

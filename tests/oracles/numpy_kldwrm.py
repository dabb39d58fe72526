"""Reference KLD-WRM ("so" and "q") in plain NumPy (float64), on the tiny network of `numpy_kfac`.

Everything is a dense matrix: factors are inverted as they are, the damping is absolute, averages start from the identity.
The step problem's matrix F + lr B is taken for (A + lr A_k) (x) (G + lr G_k) / (1 + lr), each F_i with its damping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from oracles.numpy_kfac import (
    Array,
    Parameters,
    clip_rms,
    k_factors,
    loss_and_statistics,
    parameter_matrix,
    split_matrix,
)


def curved(direction: Array, A: Array, G: Array, damping: float, rule: str) -> Array:
    """The damped curvature times a direction (dG x dA)."""
    if rule == "factor":
        return (G + damping * np.eye(len(G))) @ direction @ (A + damping * np.eye(len(A)))
    return G @ direction @ A + damping * direction


def solved(gradient: Array, A: Array, G: Array, damping: float, rule: str) -> Array:
    """What `curved` undoes: by explicit inverses, or by the Kronecker product as one dense matrix."""
    if rule == "factor":
        left = np.linalg.solve(G + damping * np.eye(len(G)), gradient)
        return np.linalg.solve(A + damping * np.eye(len(A)), left.T).T
    whole = np.kron(A, G) + damping * np.eye(len(A) * len(G))
    return np.linalg.solve(whole, gradient.T.reshape(-1)).reshape(gradient.T.shape).T


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    variant: str,
    rule: str,
    learning_rate: Callable[[int], float],
    rho: float,
    damping: float,
    factor_period: int,
    inverse_period: int,
    clip: float,
    weight_decay: float,
) -> list[Parameters]:
    """The parameters after each step."""
    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    matrices = [parameter_matrix(weight, bias) for weight, bias in parameters]
    averages = [(np.eye(m.shape[1]), np.eye(m.shape[0])) for m in matrices]
    used = list(averages)
    pull = [np.zeros_like(m) for m in matrices]  # h
    history = []
    for step, (images, labels) in enumerate(batches):
        lr = learning_rate(step)
        _, statistics = loss_and_statistics(parameters, images, labels)
        batch = [k_factors(layer) for layer in statistics]
        fresh = step % factor_period == 0
        if fresh:
            averages = [
                tuple(rho * old + (1 - rho) * new for old, new in zip(average, now, strict=True))
                for average, now in zip(averages, batch, strict=True)
            ]
        if refreshed := step % inverse_period == 0:
            used = list(averages)
        updated = []
        for index, ((weight, bias), layer) in enumerate(zip(parameters, statistics, strict=True)):
            A, G = used[index]
            corrected = layer.gradient + pull[index] / lr
            if variant == "so":
                direction = solved(corrected, A, G, damping, rule)
            else:
                A_k, G_k = batch[index] if fresh and refreshed else (A, G)
                # (A + lr A_k) (x) (G + lr G_k) / (1 + lr), and the damping of F and of B on top
                A_both, G_both = (A + lr * A_k) / (1 + lr), (G + lr * G_k) / (1 + lr)
                direction = solved(corrected, A_both, G_both, damping, rule) / (1 + lr)
            direction = clip_rms(direction, clip)
            pull[index] = rho * (pull[index] - lr * curved(direction, A, G, damping, rule))
            theta = parameter_matrix(weight, bias)
            updated.append(split_matrix((1 - lr * weight_decay) * theta - lr * direction, weight.shape))
        parameters = updated
        history.append(parameters)
    return history

"""Reference KLD-WRM ("so", "q" and "qe") in plain NumPy (float64), on the tiny network of `numpy_kfac`.

Everything is a dense matrix: factors, or what a sketch keeps of them, are inverted as they are, the damping is absolute,
averages start from the identity.
The step problem's matrix F + lr B is taken for (A + lr A_k) (x) (G + lr G_k) / (1 + lr), each F_i with its damping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oracles.numpy_kfac import (
    Array,
    Parameters,
    append_one,
    clip_rms,
    image_patches,
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


class Inner(NamedTuple):
    """Of "qe"."""

    steps: int
    lr: float
    momentum: float
    networks: int
    weight: float
    clip: float


def outputs(parameters: Parameters, images: Array) -> tuple[Array, list[Array]]:
    """Log-probabilities, and the inputs of the three layers (with a trailing one)."""
    patches = append_one(image_patches(images, *parameters[0][0].shape[2:]))
    first = np.maximum(patches @ parameter_matrix(*parameters[0]).T, 0)  # (N, S, c_out)
    flat = append_one(first.transpose(0, 2, 1).reshape(len(images), -1))
    hidden = append_one(np.maximum(flat @ parameter_matrix(*parameters[1]).T, 0))
    logits = hidden @ parameter_matrix(*parameters[2]).T
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), [patches, flat, hidden]


def divergence_gradient(parameters: Parameters, others: Sequence[Array], rho: float, images: Array) -> list[Array]:
    """d Dbar / d [W, b] of each layer; `others` are log-probabilities of the networks, oldest first."""
    logs, (patches, flat, hidden) = outputs(parameters, images)
    at_logits = np.zeros_like(logs)
    for other in others:
        p, q = np.exp(logs), np.exp(other)
        at_logs = (p * (logs - other) + (p - q)) / 2  # of sum (p - q) (log p - log q) / 2
        own = at_logs - p * at_logs.sum(axis=1, keepdims=True)
        at_logits = rho * at_logits + (1 - rho) * own / len(images)
    _, (V, _), (U, _) = parameters
    at_hidden = at_logits @ U * (hidden[:, :-1] > 0)
    at_flat = at_hidden @ V * (flat[:, :-1] > 0)
    samples, positions = patches.shape[:2]
    at_first = at_flat.reshape(samples, -1, positions).transpose(0, 2, 1)
    return [np.einsum("nsg,nsa->ga", at_first, patches), at_hidden.T @ flat, at_logits.T @ hidden]


def clipped_apart(matrix: Array, clip: float) -> Array:
    """The weight's part and the bias's, each within an RMS."""
    return np.concatenate([clip_rms(matrix[:, :-1], clip), clip_rms(matrix[:, -1:], clip)], axis=1)


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
    inner: Inner | None = None,
    sketched: Callable[[Array], Array] = lambda factor: factor,
) -> list[Parameters]:
    """The parameters after each step.

    `sketched` is what is kept of a factor, again as a matrix: asked for layer by layer, for A and then Gamma, and for those
    with the batch blended in before the running ones.
    """
    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    matrices = [parameter_matrix(weight, bias) for weight, bias in parameters]
    averages = [(np.eye(m.shape[1]), np.eye(m.shape[0])) for m in matrices]
    used = list(averages)
    pull = [np.zeros_like(m) for m in matrices]  # h
    past: list[Parameters] = []  # networks of "qe"
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
        refreshed = step % inverse_period == 0
        updated = []
        curvature = []  # F and B of each layer
        for index, ((weight, bias), layer) in enumerate(zip(parameters, statistics, strict=True)):
            blended = None
            if variant != "so" and fresh and refreshed:
                # (A + lr A_k) (x) (G + lr G_k) / (1 + lr), and the damping of F and of B on top
                both = zip(averages[index], batch[index], strict=True)
                blended = [sketched((X + lr * X_k) / (1 + lr)) for X, X_k in both]
            if refreshed:
                used[index] = tuple(sketched(X) for X in averages[index])
            A, G = used[index]
            corrected = layer.gradient + pull[index] / lr
            curvature.append(((A, G), (A, G) if blended is None else batch[index]))
            if variant == "so":
                direction = solved(corrected, A, G, damping, rule)
            else:
                direction = solved(corrected, *(blended or (A, G)), damping, rule) / (1 + lr)
            direction = clip_rms(direction, clip)
            pull[index] = rho * (pull[index] - lr * curved(direction, A, G, damping, rule))
            theta = parameter_matrix(weight, bias)
            updated.append(split_matrix((1 - lr * weight_decay) * theta - lr * direction, weight.shape))
        past.append(parameters)
        if inner is not None and len(past) >= inner.networks:
            others = [outputs(network, images)[0] for network in past[-inner.networks :]]
            start, end = ([parameter_matrix(*layer) for layer in network] for network in (parameters, updated))
            theta, velocity = [m.copy() for m in end], [np.zeros_like(m) for m in end]
            for _ in range(inner.steps):
                network = [split_matrix(m, weight.shape) for m, (weight, _) in zip(theta, parameters, strict=True)]
                away = divergence_gradient(network, others, rho, images)
                for index, layer in enumerate(statistics):
                    bent = curved(theta[index] - start[index], *curvature[index][1], damping, rule)
                    gradient = layer.gradient + bent + inner.weight / lr * away[index]
                    velocity[index] = inner.momentum * velocity[index] + clipped_apart(gradient, inner.clip)
                for index in range(len(theta)):
                    theta[index] = theta[index] - inner.lr * lr * velocity[index]
            for index in range(len(theta)):
                pull[index] += rho * curved(theta[index] - end[index], *curvature[index][0], damping, rule)
            updated = [split_matrix(m, weight.shape) for m, (weight, _) in zip(theta, parameters, strict=True)]
        parameters = updated
        history.append(parameters)
    return history

"""Reference SENG in plain NumPy (float64) for the network of `numpy_kfac`: every gradient of a sample is written out.

Symbols as there: N samples, S positions, D = dG dA entries of a gradient, U (N, D) the samples' gradients over sqrt(N),
l the damping, q what is sampled: q^2 entries of a row ("explicit"), or q rows and q columns of its matrix ("implicit").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oracles.numpy_kfac import (
    Array,
    LayerStatistics,
    Parameters,
    loss_and_statistics,
    parameter_matrix,
    split_matrix,
)

# draw(layer, what, of, count, refresh) -> numbers below `of`; `what` is "entries", "output" or "input".
Draw = Callable[[int, str, int, int, int], Array]


class Curvature(NamedTuple):
    """One batch's gradients of one layer, and the entries that were sampled of them."""

    inputs: Array  # (N, S, dA)
    gradients: Array  # (N, S, dG), sqrt(N) times those of the mean loss
    sampled: Array  # numbers of entries of vec(J), row by row
    mixed: bool  # whether U^T b is the published product


def rows_of(curvature: Curvature) -> Array:
    """U, (N, D)."""
    samples = len(curvature.inputs)
    return np.einsum("nsg,nsa->nga", curvature.gradients, curvature.inputs).reshape(samples, -1)


def shortened(inputs: Array, gradients: Array, positions: int | None) -> tuple[Array, Array]:
    """G_n ~ U S V^T with its leading `positions` singular directions: V_p G_n and V_p X_n.

    The largest entry of a singular vector is positive, and directions without a singular value are left out.
    """
    if positions is None or gradients.shape[1] <= positions:
        return inputs, gradients
    short_inputs = np.zeros((len(inputs), positions, inputs.shape[2]))
    short_gradients = np.zeros((len(inputs), positions, gradients.shape[2]))
    for n in range(len(inputs)):
        left, values, _ = np.linalg.svd(gradients[n], full_matrices=False)
        for k in range(min(positions, len(values))):
            if values[k] <= 64 * np.finfo(float).eps * values[0]:
                continue
            vector = left[:, k] * np.sign(left[np.abs(left[:, k]).argmax(), k])
            short_inputs[n, k], short_gradients[n, k] = vector @ inputs[n], vector @ gradients[n]
    return short_inputs, short_gradients


def curvature_of(
    statistics: LayerStatistics,
    layer: int,
    refresh: int,
    *,
    columns: int | None,
    explicit_up_to: int,
    positions: int | None,
    product: str,
    draw: Draw,
) -> Curvature:
    """What a layer keeps of a batch."""
    inputs, gradients = statistics.inputs, np.sqrt(len(statistics.inputs)) * statistics.output_gradients
    d_out, d_in = gradients.shape[2], inputs.shape[2]
    entries = np.arange(d_out * d_in)
    if d_out * d_in <= explicit_up_to:
        if columns is not None and len(entries) > columns**2:
            entries = draw(layer, "entries", len(entries), columns**2, refresh)
        return Curvature(inputs, gradients, entries, False)
    inputs, gradients = shortened(inputs, gradients, positions)
    chosen_out, chosen_in = np.arange(d_out), np.arange(d_in)
    if columns is not None and d_out > columns:
        chosen_out = draw(layer, "output", d_out, columns, refresh)
    if columns is not None and d_in > columns:
        chosen_in = draw(layer, "input", d_in, columns, refresh)
    entries = (chosen_out[:, None] * d_in + chosen_in[None]).ravel()
    return Curvature(inputs, gradients, entries, product == "published")


def absolute_damping(curvature: Curvature, damping: float, relative_to: str | None) -> float:
    """l itself, or so many of the mean or largest eigenvalues of F as far as it was sampled."""
    if relative_to is None:
        return damping
    U = rows_of(curvature)
    U_s = U[:, curvature.sampled] * np.sqrt(U.shape[1] / len(curvature.sampled))
    values = np.linalg.eigvalsh(U_s @ U_s.T)
    return damping * (values.max() if relative_to == "largest" else values.sum() / U.shape[1])


def precondition(gradient: Array, curvature: Curvature, damping: float, scaling: str) -> Array:
    """1/l [g - U^T (l I + U_s U_s^T)^-1 U_s g_s], what is sampled being scaled up."""
    U, g = rows_of(curvature), gradient.ravel()
    share = len(g) / len(curvature.sampled)
    up = np.sqrt(share) if scaling == "unbiased" else share
    U_s, g_s = up * U[:, curvature.sampled], up * g[curvature.sampled]
    b = np.linalg.solve(damping * np.eye(len(U)) + U_s @ U_s.T, U_s @ g_s)
    back = U.T @ b
    if curvature.mixed:
        root = np.sqrt(np.abs(b))
        left = np.einsum("n,nsg->gs", root, curvature.gradients)
        right = np.einsum("n,nsa->as", b, curvature.inputs) / (root.sum() or 1.0)
        back = (left @ right.T).ravel()
    return ((g - back) / damping).reshape(gradient.shape)


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    draw: Draw,
    columns: int | None,
    explicit_up_to: int,
    positions: int | None,
    product: str,
    scaling: str,
    damping: float,
    relative_to: str | None,
    period: int,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
) -> tuple[list[Parameters], list[float]]:
    """One step per batch; the parameters after each step and each step's loss before it."""
    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    buffers = [np.zeros_like(parameter_matrix(weight, bias)) for weight, bias in parameters]
    curvatures: list[Curvature] = []
    history: list[Parameters] = []
    losses: list[float] = []
    for step, (images, labels) in enumerate(batches):
        loss, statistics = loss_and_statistics(parameters, images, labels)
        if step % period == 0:
            curvatures = [
                curvature_of(
                    layer,
                    index,
                    step // period,
                    columns=columns,
                    explicit_up_to=explicit_up_to,
                    positions=positions,
                    product=product,
                    draw=draw,
                )
                for index, layer in enumerate(statistics)
            ]
        updated = []
        for index, ((weight, bias), layer) in enumerate(zip(parameters, statistics, strict=True)):
            own = absolute_damping(curvatures[index], damping, relative_to)
            direction = precondition(layer.gradient, curvatures[index], own, scaling)
            theta = parameter_matrix(weight, bias)
            buffers[index] = momentum * buffers[index] + direction + weight_decay * theta
            updated.append(split_matrix(theta - learning_rate * buffers[index], weight.shape))
        parameters = updated
        history.append(parameters)
        losses.append(loss)
    return history, losses

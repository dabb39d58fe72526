"""Reference K-FAC, RS-KFAC and SRE-KFAC in plain NumPy (float64) for one tiny network.

Network: Conv2d(3x3, padding 1, stride 1) -> activation -> flatten -> Linear -> activation -> Linear, every layer with a
bias, under the mean softmax cross-entropy. Nothing here is fast; each line follows its formula as closely as it can.

Symbols: N samples, S output positions of a layer (1 for Linear), dA inputs of a layer including the bias coordinate,
dG outputs of a layer, J the gradient of the mean loss as a dG x dA matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Parameters = list[tuple[Array, Array]]  # (weight, bias) of the conv and of the two linear layers, in PyTorch's layout
Draw = Callable[[int, int], Array]
Scheduled = float | Callable[[int], float]  # a hyper-parameter: a number, or a function of the step

EIGENVALUE_FLOOR = 1e-10


class LayerStatistics(NamedTuple):
    """What one forward and backward pass leaves behind for one layer."""

    gradient: Array  # J, (dG, dA): bias in the last column, conv columns in the order (c_in, kh, kw)
    inputs: Array  # (N, S, dA): patches or activations, with a trailing 1
    output_gradients: Array  # (N, S, dG): gradient of the mean loss at the layer output


class Eigenpairs(NamedTuple):
    """The factor's approximation U diag(values) U^T, values in decreasing order."""

    vectors: Array  # (d, r)
    values: Array  # (r,)


# ----------------------------------------------------------------------------------------------------- the network


def image_patches(images: Array, kernel_height: int = 3, kernel_width: int = 3, padding: int = 1) -> Array:
    """(N, c, H, W) -> (N, S, c*kh*kw): the patch below every output position, positions in row-major order."""
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    samples, channels, height, width = padded.shape
    rows, columns = height - kernel_height + 1, width - kernel_width + 1
    patches = np.zeros((samples, rows, columns, channels, kernel_height, kernel_width))
    for row in range(rows):
        for column in range(columns):
            patches[:, row, column] = padded[:, :, row : row + kernel_height, column : column + kernel_width]
    return patches.reshape(samples, rows * columns, channels * kernel_height * kernel_width)


def parameter_matrix(weight: Array, bias: Array) -> Array:
    """[W, b] as a dG x dA matrix; a C-order reshape flattens a conv weight in the order (c_in, kh, kw)."""
    return np.concatenate([weight.reshape(len(weight), -1), bias[:, None]], axis=1)


def split_matrix(matrix: Array, weight_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The inverse of `parameter_matrix`."""
    return matrix[:, :-1].reshape(weight_shape).copy(), matrix[:, -1].copy()


def append_one(columns: Array) -> Array:
    return np.concatenate([columns, np.ones((*columns.shape[:-1], 1))], axis=-1)


def activate(outputs: Array, activation: str) -> tuple[Array, Array]:
    """The activation and its derivative, both at `outputs`."""
    if activation == "relu":
        return np.maximum(outputs, 0.0), (outputs > 0).astype(float)
    if activation == "tanh":
        return np.tanh(outputs), 1.0 - np.tanh(outputs) ** 2
    raise ValueError(f"unknown activation {activation!r}")


def loss_and_statistics(
    parameters: Parameters, images: Array, labels: Array, *, activation: str = "relu"
) -> tuple[float, list[LayerStatistics]]:
    """Mean cross-entropy of the batch and the statistics of the three layers, in network order."""
    (conv_weight, conv_bias), (hidden_weight, hidden_bias), (last_weight, last_bias) = parameters
    samples = len(images)

    conv_inputs = append_one(image_patches(images, *conv_weight.shape[2:]))
    conv_outputs = conv_inputs @ parameter_matrix(conv_weight, conv_bias).T  # (N, S, c_out)
    conv_active, conv_slope = activate(conv_outputs, activation)
    # PyTorch flattens (c_out, H, W), channels first, so positions have to come last before the reshape.
    flat = conv_active.transpose(0, 2, 1).reshape(samples, -1)
    hidden_inputs = append_one(flat)
    hidden_outputs = hidden_inputs @ parameter_matrix(hidden_weight, hidden_bias).T
    hidden_active, hidden_slope = activate(hidden_outputs, activation)
    last_inputs = append_one(hidden_active)
    logits = last_inputs @ parameter_matrix(last_weight, last_bias).T

    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    chosen = (np.arange(samples), labels)
    loss = -log_probabilities[chosen].mean()

    last_gradients = np.exp(log_probabilities)
    last_gradients[chosen] -= 1.0
    last_gradients /= samples  # of the mean loss
    hidden_gradients = (last_gradients @ last_weight) * hidden_slope
    flat_gradients = hidden_gradients @ hidden_weight
    channels, positions = len(conv_weight), conv_outputs.shape[1]
    conv_gradients = flat_gradients.reshape(samples, channels, positions).transpose(0, 2, 1) * conv_slope

    per_layer = [
        (conv_inputs, conv_gradients),
        (hidden_inputs[:, None], hidden_gradients[:, None]),
        (last_inputs[:, None], last_gradients[:, None]),
    ]
    return float(loss), [
        LayerStatistics(np.einsum("nsg,nsa->ga", gradients, inputs), inputs, gradients)
        for inputs, gradients in per_layer
    ]


def k_factors(statistics: LayerStatistics) -> tuple[Array, Array]:
    """The batch's factors A (dA x dA) and Gamma (dG x dG).

    Conv: A = 1/(N S^2) sum a a^T and Gamma = N S sum g g^T. At S=1 these are the Linear formulas, A = 1/N sum a a^T and
    Gamma = N sum g g^T, so one expression serves both.
    """
    inputs, gradients = statistics.inputs, statistics.output_gradients
    samples, positions = inputs.shape[:2]
    input_factor = np.einsum("nsi,nsj->ij", inputs, inputs) / (samples * positions**2)
    output_factor = samples * positions * np.einsum("nsi,nsj->ij", gradients, gradients)
    return input_factor, output_factor


# -------------------------------------------------------------------------------------------------- decompositions


def exact_eigenpairs(factor: Array, rank: int | None = None) -> Eigenpairs:
    """The `rank` leading eigenpairs (all of them by default) of a dense eigendecomposition."""
    values, vectors = np.linalg.eigh((factor + factor.T) / 2)
    order = np.argsort(values)[::-1][:rank]
    return Eigenpairs(vectors[:, order], floored(values[order]))


def range_finder(factor: Array, omega: Array, power_iterations: int) -> Array:
    """An orthonormal basis of span(X^power_iterations Omega).

    In exact arithmetic the QR after each product leaves the span as it is; in floating point it keeps the small modes.
    """
    basis = np.linalg.qr(omega)[0]
    for _ in range(power_iterations):
        basis = np.linalg.qr(factor @ basis)[0]
    return basis


def rsvd(factor: Array, omega: Array, rank: int, power_iterations: int) -> Eigenpairs:
    """Algorithm 2, the V side: X is close to V Sigma V^T with B = Q^T X = U_B Sigma V^T."""
    basis = range_finder(factor, omega, power_iterations)
    projected = basis.T @ factor
    # As the algorithm says: the full SVD of B^T. Its left vectors are the V side of B.
    right_vectors, singular_values, _ = np.linalg.svd(projected.T, full_matrices=True)
    return Eigenpairs(right_vectors[:, :rank], floored(singular_values[:rank]))


def srevd(factor: Array, omega: Array, rank: int, power_iterations: int) -> Eigenpairs:
    """Algorithm 3: eigenpairs of C = Q^T X Q, carried back by Q."""
    basis = range_finder(factor, omega, power_iterations)
    small = exact_eigenpairs(basis.T @ factor @ basis, rank)
    return Eigenpairs(basis @ small.vectors, small.values)


def floored(values: Array) -> Array:
    return np.where(values <= EIGENVALUE_FLOOR, 0.0, values)


def decompose(
    factor: Array, method: str, *, rank: int, oversampling: int, power_iterations: int, draw: Draw | None
) -> Eigenpairs:
    """'exact' keeps all modes; 'rsvd' and 'srevd' keep min(rank, d) and call `draw(d, p)` once, if p < d."""
    if method == "exact":
        return exact_eigenpairs(factor)
    randomized = {"rsvd": rsvd, "srevd": srevd}[method]
    size = len(factor)
    width = min(rank + oversampling, size)
    if width >= size:  # a sketch as wide as the matrix saves nothing
        return exact_eigenpairs(factor, min(rank, size))
    if draw is None:
        raise ValueError(f"method {method!r} needs draw")
    omega = np.asarray(draw(size, width), dtype=float)
    if omega.shape != (size, width):
        raise ValueError(f"draw({size}, {width}) returned shape {omega.shape}")
    return randomized(factor, omega, min(rank, size), power_iterations)


# ------------------------------------------------------------------------------------------------------- the step


def damped_inverse_times(pairs: Eigenpairs, damping: float, matrix: Array) -> Array:
    """Equation (13): (U D U^T + lambda I)^{-1} V = U [(D + lambda I)^{-1} - I/lambda] U^T V + V/lambda."""
    U = pairs.vectors
    middle = np.diag(1.0 / (pairs.values + damping) - 1.0 / damping)
    return U @ middle @ U.T @ matrix + matrix / damping


def precondition(
    gradient: Array, input_pairs: Eigenpairs | None, output_pairs: Eigenpairs | None, kappa: float, rule: str
) -> Array:
    """The direction S (dG x dA) under relative damping; a side of None is left out.

    'factor': (Gamma + lambda_Gamma I)^{-1} J (A + lambda_A I)^{-1}, lambda_X = kappa * (largest retained value of X).
    'product': (A kron Gamma + lambda I)^{-1} vec(J), lambda = kappa * (largest of A) * (largest of Gamma). A discarded
    mode has eigenvalue zero, as in equation (13), so its part of J is divided by lambda alone. A side that is left out
    is the identity: 'factor' does not damp it, 'product' counts it among the products.
    """
    if rule == "factor":
        M = gradient
        if input_pairs is not None:
            M = damped_inverse_times(input_pairs, kappa * input_pairs.values.max(), M.T).T
        if output_pairs is not None:
            M = damped_inverse_times(output_pairs, kappa * output_pairs.values.max(), M)
        return M
    if rule == "product":
        input_pairs, output_pairs = (
            Eigenpairs(np.eye(size), np.ones(size)) if pairs is None else pairs
            for pairs, size in ((input_pairs, gradient.shape[1]), (output_pairs, gradient.shape[0]))
        )
        products = np.outer(output_pairs.values, input_pairs.values)
        damping = kappa * output_pairs.values.max() * input_pairs.values.max()
        rotated = output_pairs.vectors.T @ gradient @ input_pairs.vectors
        correction = rotated / (products + damping) - rotated / damping
        return output_pairs.vectors @ correction @ input_pairs.vectors.T + gradient / damping
    raise ValueError(f"unknown damping rule {rule!r}")


def clip_rms(direction: Array, limit: float) -> Array:
    """Scale the layer's whole direction, weight and bias together, so that its root mean square is at most `limit`."""
    rms = np.sqrt(np.mean(direction**2))
    return direction * (limit / rms) if rms > limit else direction


def train(
    parameters: Parameters,
    batches: Sequence[tuple[Array, Array]],
    *,
    method: str = "exact",
    sides: str = "both",
    damping_rule: str = "factor",
    activation: str = "relu",
    draw: Draw | None = None,
    learning_rate: Scheduled = 0.3,
    kappa: Scheduled = 0.1,
    rho: Scheduled = 0.95,
    factor_period: Scheduled = 10,
    inverse_period: Scheduled = 50,
    rank: Scheduled = 220,
    oversampling: Scheduled = 10,
    power_iterations: Scheduled = 4,
    clip: Scheduled = 0.07,
    weight_decay: Scheduled = 7e-4,
    weight_decay_start: int = 200,
) -> tuple[list[Parameters], list[float]]:
    """One step per batch (images, labels); returns the parameters after each step and each step's loss before it.

    The defaults are the paper's values in its first epoch. Every schedule is read at the current step, so a new kappa
    acts at once, on eigenvalues that may be older. `draw` is called in network order, for A and then Gamma of a layer;
    `sides` "input" or "output": for one of them, the other is left out.
    """

    def at(setting: Scheduled, step: int) -> float:
        return setting(step) if callable(setting) else setting

    parameters = [(np.array(weight, dtype=float), np.array(bias, dtype=float)) for weight, bias in parameters]
    matrices = [parameter_matrix(weight, bias) for weight, bias in parameters]
    # [A, Gamma] of each layer, starting from the identity
    averages = [[np.eye(matrix.shape[1]), np.eye(matrix.shape[0])] for matrix in matrices]
    decompositions: list[list[Eigenpairs | None]] = []
    kept = {"both": (True, True), "input": (True, False), "output": (False, True)}[sides]
    history: list[Parameters] = []
    losses: list[float] = []

    for step, (images, labels) in enumerate(batches):
        loss, statistics = loss_and_statistics(parameters, images, labels, activation=activation)

        if step % int(at(factor_period, step)) == 0:
            keep = at(rho, step)
            averages = [
                [keep * old + (1.0 - keep) * new for old, new in zip(average, k_factors(layer), strict=True)]
                for average, layer in zip(averages, statistics, strict=True)
            ]
        if step % int(at(inverse_period, step)) == 0:  # after this step's average, step 0 included
            sizes = {
                "rank": int(at(rank, step)),
                "oversampling": int(at(oversampling, step)),
                "power_iterations": int(at(power_iterations, step)),
            }
            decompositions = [
                [
                    decompose(X, method, draw=draw, **sizes) if own else None
                    for X, own in zip(average, kept, strict=True)
                ]
                for average in averages
            ]

        # Decay is neither preconditioned nor clipped, and is off until its start step.
        decay = at(weight_decay, step) if step >= weight_decay_start else 0.0
        updated = []
        for (weight, bias), layer, (input_pairs, output_pairs) in zip(
            parameters, statistics, decompositions, strict=True
        ):
            direction = precondition(layer.gradient, input_pairs, output_pairs, at(kappa, step), damping_rule)
            direction = clip_rms(direction, at(clip, step))
            theta = parameter_matrix(weight, bias)
            updated.append(split_matrix(theta - at(learning_rate, step) * (direction + decay * theta), weight.shape))
        parameters = updated
        history.append(parameters)
        losses.append(loss)
    return history, losses

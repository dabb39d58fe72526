"""How large a gradient is, and the unit in which no number of a solve overflows or vanishes."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.linalg.host import Number, at_once, number
from rkfac.linalg.scaling import SAFE, peak


def moderate(scale: Number) -> bool:
    """Whether a multiple of this size is a number in float32, whatever else it is multiplied by."""
    return not isinstance(scale, Tensor) and SAFE[0] < scale < SAFE[1]


def square_of(t: Tensor) -> Number:
    """The squared length, for which no entry is squared in less than float64's range."""
    length = number(torch.linalg.vector_norm(t).double())
    return length * length


def measured(
    J: Tensor, j: Tensor | None, dtype: torch.dtype, moderate: bool
) -> tuple[Tensor, Tensor | None, Number, Number, Number | None, Number]:
    """J and j, ||[J | j]||^2 (one a group, and in all), and the unit they are multiplied by and its inverse.

    Nothing is copied where the length says that no square overflows or vanishes, and `moderate` that no multiple does.
    """
    if moderate and J.dtype == dtype and at_once(J):
        norms, total = _squares(J, j)
        if SAFE[0] ** 2 < total < SAFE[1] ** 2:
            return J, j, norms, total, None, 1.0
    J, j, size = in_units_of_its_peak(J, j, dtype)
    unit = torch.where(size > 0, 1 / size, 1.0).to(dtype) if isinstance(size, Tensor) else 1 / size if size else 1.0
    return J, j, *_squares(J, j), unit, size


def _squares(J: Tensor, j: Tensor | None) -> tuple[Number, Number]:
    """||[J | j]||^2, one a group and in all."""
    if J.ndim == 2:
        total = square_of(J) if j is None else square_of(J) + square_of(j)
        return total, total
    norms = torch.linalg.vector_norm(J, dim=(-2, -1)).double().square()
    norms = norms if j is None else norms + torch.linalg.vector_norm(j, dim=-1).double().square()
    return norms, number(norms.sum())


def in_units_of_its_peak(J: Tensor, j: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Number]:
    """Copies of J and j in units of a power of two near their largest entry, and that unit."""
    largest_entry = peak(J) if j is None else torch.maximum(peak(J), peak(j))
    # Not beyond what can be a factor in this precision; NaN and Inf have no exponent and stay what they are.
    largest = 120 if torch.finfo(J.dtype).bits <= 32 else 1000
    exponent = torch.frexp(largest_entry.double()).exponent.clamp(-largest, largest)
    unit = torch.exp2(-exponent.to(dtype))
    matrix = torch.mul(J, unit, out=torch.empty(J.shape, dtype=dtype, device=J.device))
    # A gradient of zero has no size: beside a damping below 1e-38 any other would be Inf in float32, and 0 * Inf is NaN.
    size = number(torch.where(largest_entry == 0, 0.0, torch.exp2(exponent.double())))
    return matrix, None if j is None else (j * unit).to(dtype), size


def joined(matrix: Tensor, vector: Tensor | None) -> Tensor:
    """The bias is the last column."""
    return matrix if vector is None else torch.cat([matrix, vector[..., None]], dim=-1)

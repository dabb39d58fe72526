"""Matrices of any size within float32's range: the arithmetic runs near one, by powers of two.

A power of two changes no digit, so a matrix of ordinary size is decomposed to the same bits as without it, and no norm,
Gram matrix or shift of a very large or very small one leaves the range (squares already do beyond 1e19 and 1e-19).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAFE = (1e-15, 1e15)  # lengths whose square float32 can hold


def magnitude(X: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Largest absolute value along `dim` (kept), NaN if there is one; no copy, and a tenth of the time of vector_norm."""
    return torch.maximum(X.amax(dim, keepdim=True), -X.amin(dim, keepdim=True))


def unit_scale(peak: Tensor) -> Tensor:
    """The power of two that brings a largest magnitude into [1/2, 1); zero gets a large one, which is as good as any."""
    least = 4 * torch.finfo(peak.dtype).tiny  # so that half the scale and its reciprocal are normal numbers
    peak = peak.clamp(least, 1 / least)
    return torch.frexp(peak).mantissa / peak


def power_near(x: Tensor) -> Tensor:
    """The smallest power of two above each (positive) x, exactly."""
    return x / torch.frexp(x).mantissa


def times(V: Tensor, factor: Tensor) -> Tensor:
    """factor * V with a (positive) float64 factor a matrix; V's dtype need not hold it, so it goes in by halves."""
    half = power_near(factor.sqrt())
    return (V * half.to(V.dtype)[..., None, None]).mul_((factor / half).to(V.dtype)[..., None, None])


def peak(t: Tensor) -> Tensor:
    """Largest magnitude of all entries in one pass; NaN if there is one."""
    low, high = torch.aminmax(t)
    return torch.maximum(-low, high)


def unit_of(tensors: Sequence[Tensor]) -> Tensor:
    """A power of two near their largest entry, in float64."""
    largest = torch.stack([peak(t).double() for t in tensors]).amax()
    return power_near(largest.clamp(2.0**-120, 2.0**120))

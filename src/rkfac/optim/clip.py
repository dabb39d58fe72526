"""Clips: how long an update may be."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rkfac.linalg import Number


def kl_clip(terms: Iterable[Number], bound: float) -> Tensor:
    """min(1, sqrt(bound / sum lr^2 <S, J>)): keeps the step's quadratic KL estimate below the bound.

    A layer whose gradient holds NaN is left out, so that it does not take the others with it.
    """
    numbers = [term if isinstance(term, Tensor) else torch.tensor(term, dtype=torch.float64) for term in terms]
    total = torch.stack(numbers).nan_to_num(nan=0.0, posinf=math.inf, neginf=0.0).sum()
    return (bound / total.clamp_min(torch.finfo(total.dtype).tiny)).sqrt().clamp_max(1.0)


def rms_clip(norm: Number, size: int, largest: float | None) -> Number | None:
    """min(1, largest / rms) for an update of `size` entries and length `norm`; None when there is no clip."""
    if largest is None:
        return None
    if not isinstance(norm, Tensor):
        most = largest * math.sqrt(size)
        return most / norm if norm > most else 1.0 if norm <= most else math.nan
    rms = norm.double() / math.sqrt(size)
    return (largest / rms.clamp_min(torch.finfo(rms.dtype).tiny)).clamp_max(1.0)


def within(direction: Tensor, largest: float | None) -> Tensor:
    """A direction, scaled down to an RMS of `largest`; the norm is taken without squares that overflow."""
    if largest is None or direction.numel() == 0:
        return direction
    peak = torch.linalg.vector_norm(direction, ord=math.inf).double()
    unit = torch.where(peak > 0, peak, 1.0)
    norm = torch.linalg.vector_norm(direction / unit.to(direction.real.dtype)).double() * unit
    clip = rms_clip(norm, direction.numel(), largest)
    return direction if clip is None else direction * clip

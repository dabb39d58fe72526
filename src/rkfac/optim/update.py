"""Clip, momentum, weight decay and the fallback rules: pure arithmetic on tensors, no synchronisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def rms_clip(norm: Tensor, size: int, largest: float | None) -> Tensor | None:
    """min(1, largest / rms) for an update of `size` entries and length `norm`; None when there is no clip."""
    if largest is None:
        return None
    rms = norm.double() / math.sqrt(size)
    return (largest / rms.clamp_min(torch.finfo(rms.dtype).tiny)).clamp_max(1.0)


def kl_clip(terms: Iterable[Tensor], bound: float) -> Tensor:
    """min(1, sqrt(bound / sum lr^2 <S, J>)): keeps the step's quadratic KL estimate below the bound.

    A layer whose gradient holds NaN is left out, so that it does not take the others with it.
    """
    total = torch.stack(list(terms)).nan_to_num(nan=0.0, posinf=math.inf, neginf=0.0).sum()
    return (bound / total.clamp_min(torch.finfo(total.dtype).tiny)).sqrt().clamp_max(1.0)


def decay(parameter: Tensor, group: Mapping[str, Any], step: int) -> None:
    """theta <- theta - lr w theta, once weight decay has begun."""
    if group["weight_decay"] and step >= group["weight_decay_from"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])


def momentum_buffer(state: MutableMapping[str, Any], parameter: Tensor) -> Tensor:
    """The running sum of directions, made when there is none yet."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    buffer: Tensor = state["momentum_buffer"]
    return buffer


def prepare_sgd(state: MutableMapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Make the buffers a step needs before anything moves: there may be no memory for them."""
    if group["momentum"]:
        momentum_buffer(state, parameter)


def sgd_direction(
    state: MutableMapping[str, Any], gradient: Tensor, group: Mapping[str, Any], largest: float | None = None
) -> Tensor:
    """The gradient, clipped to an RMS of `largest`, or its momentum buffer."""
    gradient = within(gradient, largest)
    if not group["momentum"]:
        return gradient
    return momentum_buffer(state, gradient).mul_(group["momentum"]).add_(gradient)


def prepare_adamw(state: MutableMapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Likewise."""
    if "exp_avg" not in state:
        like = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        first, second = torch.zeros_like(like), torch.zeros_like(like)
        state["exp_avg"], state["exp_avg_sq"], state["adam_step"] = first, second, 0


def adamw_direction(
    state: MutableMapping[str, Any],
    gradient: Tensor,
    group: Mapping[str, Any],
    largest: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    """Adam's direction with its usual constants, clipped to an RMS of `largest`; decoupled weight decay happens outside.

    A complex number counts as its two real parts, as in torch.
    """
    if gradient.is_complex():
        real = adamw_direction(state, torch.view_as_real(gradient), group, largest, betas, eps)
        return torch.view_as_complex(real)
    prepare_adamw(state, gradient, group)
    state["adam_step"] += 1
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    correction = 1 - betas[1] ** state["adam_step"]
    denominator = (square / correction).sqrt_().add_(eps)
    return within((mean / (1 - betas[0] ** state["adam_step"])).div_(denominator), largest)


def within(direction: Tensor, largest: float | None) -> Tensor:
    """A direction, scaled down to an RMS of `largest`; the norm is taken without squares that overflow."""
    if largest is None or direction.numel() == 0:
        return direction
    peak = torch.linalg.vector_norm(direction, ord=math.inf).double()
    unit = torch.where(peak > 0, peak, 1.0)
    norm = torch.linalg.vector_norm(direction / unit.to(direction.real.dtype)).double() * unit
    clip = rms_clip(norm, direction.numel(), largest)
    return direction if clip is None else direction * clip.to(direction.real.dtype)


FALLBACKS = {"sgd": sgd_direction, "adamw": adamw_direction}
PREPARE = {"sgd": prepare_sgd, "adamw": prepare_adamw}

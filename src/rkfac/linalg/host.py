"""Numbers: plain ones where a device's values can be read at once, tensors of one entry where nobody shall wait for them.

Both kinds take the same arithmetic, and a plain one costs a hundredth of it: a small layer's step is little else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Number = float | Tensor
Truth = bool | Tensor


def at_once(tensor: Tensor) -> bool:
    """Whether reading a value waits for nobody; elsewhere decisions that need one are taken on the device."""
    return tensor.device.type == "cpu"


def number(value: Tensor) -> Number:
    """One entry as what is calculated with."""
    return value.item() if at_once(value) else value


def root(x: Number) -> Number:
    """Square root of what is not negative."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def ratio(x: Number, y: Number) -> Number:
    """x / y, and zero where y is not positive."""
    if isinstance(y, Tensor):
        return torch.where(y > 0, x / y, 0.0)
    return x / y if y > 0 else x * 0.0


def size_of(x: Number) -> Number:
    """x as what others are measured in: one where it is not positive."""
    if isinstance(x, Tensor):
        return torch.where(x > 0, x, torch.ones_like(x))
    return x if x > 0 else 1.0


def kept(x: Number, keep: Tensor) -> Number:
    """x where `keep` holds, zero elsewhere."""
    if not isinstance(x, Tensor):
        if at_once(keep):
            return x if bool(keep) else 0.0
        x = torch.full((), x, dtype=torch.float64, device=keep.device)
    return torch.where(keep, x, torch.zeros_like(x))


def add_multiple(target: Tensor, tensor: Tensor, amount: Number) -> None:
    """target <- target + amount * tensor, in place."""
    if isinstance(amount, Tensor):
        target.addcmul_(tensor, amount.to(target.dtype))
    elif abs(amount) <= torch.finfo(target.dtype).max:  # False for NaN as well
        target.add_(tensor, alpha=amount)
    else:
        target.addcmul_(tensor, target.new_tensor(amount))

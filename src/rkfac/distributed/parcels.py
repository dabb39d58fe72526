"""Tensors of all kinds as one message of bytes, and labels that say what is in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Any]  # tensors by name, and values that are none
Label = Sequence[tuple[str, Any]]  # names with (dtype, shape) of a tensor, or with a value that is none


def label(parts: Parts) -> Label:
    """What a process must know to open them."""
    return [(name, (v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else v) for name, v in parts.items()]


def size(known: Label) -> int:
    """Bytes of what is labelled."""
    return sum(_bytes(*value) for _, value in known if isinstance(value, tuple))


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def packed(several: Iterable[Parts], device: torch.device) -> Tensor:
    """The bytes of all of them, one after the other."""
    tensors = [v for parts in several for v in parts.values() if isinstance(v, Tensor)]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([nothing, *(t.to(device).contiguous().reshape(-1).view(torch.uint8) for t in tensors)])


def opened(known: Label, buffer: Tensor) -> dict[str, Any]:
    """And back."""
    found: dict[str, Any] = {}
    at = 0
    for name, value in known:
        if not isinstance(value, tuple):
            found[name] = value
            continue
        dtype, shape = value
        end = at + _bytes(dtype, shape)
        # A copy begins where its own memory does, wherever the bytes lay in the message.
        found[name] = buffer[at:end].clone().view(dtype).reshape(shape)
        at = end
    return found

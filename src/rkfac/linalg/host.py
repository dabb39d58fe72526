"""Where a tensor's values can be read at once."""

from __future__ import annotations

from torch import Tensor


def at_once(tensor: Tensor) -> bool:
    """Whether reading a value waits for nobody; elsewhere decisions that need one are taken on the device."""
    return tensor.device.type == "cpu"

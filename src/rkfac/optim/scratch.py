"""Memory that a step works in: as large as the largest layer, kept, and used by one layer after the other."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """On a CPU a new tensor of a large weight's size costs more than ten passes over it: its pages come one by one."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def like(self, tensor: Tensor, slot: int = 0) -> Tensor:
        """Uninitialised, laid out as the tensor is and valid until the same slot is asked for again.

        16-bit tensors get 32 bits: what is worked on here goes into matrix products.
        """
        dtype = tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32
        key, size = (tensor.device, dtype, slot), tensor.numel()
        if key not in self._memory or self._memory[key].numel() < size:
            self._memory[key] = torch.empty(size, dtype=dtype, device=tensor.device)
        room = self._memory[key][:size]
        dense = sorted(zip(tensor.stride(), tensor.shape, strict=True))
        expected = 1
        for stride, length in dense:
            if length > 1:
                if stride != expected:  # overlapping, or with gaps
                    return room.view(tensor.shape)
                expected *= length
        return room.as_strided(tensor.shape, tensor.stride())

"""Augmentation of whole batches on tensors, with its randomness from one generator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Zero-pad, cut a random window of the old size, mirror half of the images; (n, c, h, w) in and out."""
    count, channels, height, width = images.shape
    top = torch.randint(2 * padding + 1, (count, 1), generator=generator)
    left = torch.randint(2 * padding + 1, (count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows = top + torch.arange(height)
    columns = left + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    sample = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    rows, columns = rows.to(images.device), columns.to(images.device)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]

"""Made-up batches with the statistics that matter to curvature: a spectrum that decays, labels that can be learned.

One batch of white noise again and again would give running averages of the rank of that batch and a flat spectrum; a
pool of batches that contestants walk through in the same order gives them what a training on real data gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
POOL = 16
DECAY = 1.3  # the n-th eigenvalue of CIFAR-10's pixels is about n^-1.3 of the first
DESCRIPTIONS = {
    "pictures": "noise whose power falls as in CIFAR-10's images (1/f^2.6), labels by the argmax of a fixed random linear map",
    "signals": "noise whose power falls as 1/f^1.3 along each row, labels by the argmax of a fixed random linear map",
    "sentences": "a Markov chain of order 1 over Zipf-distributed tokens with skewed transitions; the next token is wanted",
}


def pictures(batch: int, channels: int, side: int, classes: int = 10, pool: int = POOL) -> list[Batch]:
    """Images (batch, channels, side, side), normalised each; channels share most of what they show."""
    g = torch.Generator().manual_seed(0)
    white = torch.randn(pool * batch, 1, side, side, generator=g)
    white = white + 0.5 * torch.randn(pool * batch, channels, side, side, generator=g)
    return _labelled(_coloured(white, dimensions=2), batch, classes, g)


def signals(batch: int, width: int, classes: int, pool: int = POOL) -> list[Batch]:
    """Rows (batch, width), normalised each."""
    g = torch.Generator().manual_seed(0)
    return _labelled(_coloured(torch.randn(pool * batch, width, generator=g), dimensions=1), batch, classes, g)


def sentences(batch: int, length: int, vocabulary: int, pool: int = POOL) -> list[Batch]:
    """Token numbers (batch, length) and the same shifted by one."""
    g = torch.Generator().manual_seed(0)
    frequency = 1.0 / torch.arange(1, vocabulary + 1)
    transitions = frequency * torch.exp(2 * torch.randn(vocabulary, vocabulary, generator=g))
    tokens = [torch.multinomial(frequency, pool * batch, replacement=True, generator=g)]
    for _ in range(length):
        tokens.append(torch.multinomial(transitions[tokens[-1]], 1, generator=g)[:, 0])
    text = torch.stack(tokens, dim=1)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text.split(batch)]


def _coloured(white: Tensor, dimensions: int) -> Tensor:
    """Noise whose n-th eigenvalue falls like n^-DECAY: there are about f^dimensions frequencies below f."""
    axes = tuple(range(-dimensions, 0))
    frequencies = [torch.fft.fftfreq(white.shape[axis]) for axis in axes[:-1]]
    grid = torch.meshgrid(*frequencies, torch.fft.rfftfreq(white.shape[-1]), indexing="ij")
    square = torch.stack([f.square() for f in grid]).sum(0)
    amplitude = torch.where(square > 0, square.clamp_min(1e-12).pow(-DECAY * dimensions / 4), 0.0)  # no row has a mean
    spectrum = torch.fft.rfftn(white, dim=axes) * amplitude
    coloured = torch.fft.irfftn(spectrum, s=white.shape[-dimensions:], dim=axes)
    return coloured / coloured.flatten(1).std(1).view(-1, *[1] * (white.ndim - 1))


def _labelled(inputs: Tensor, batch: int, classes: int, generator: torch.Generator) -> list[Batch]:
    flat = inputs.flatten(1)
    labels = (flat @ torch.randn(flat.shape[1], classes, generator=generator)).argmax(1)
    return list(zip(inputs.split(batch), labels.split(batch), strict=True))

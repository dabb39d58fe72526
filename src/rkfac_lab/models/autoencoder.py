"""The deep autoencoder on which second-order methods have been compared since 2006."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from .registry import model

ENCODER = (784, 1000, 500, 250, 30)


@model("autoencoder")
def autoencoder(encoder: Sequence[int] = ENCODER) -> nn.Module:
    """Mirror-image encoder and decoder, tanh between layers, linear code, output logits."""
    sizes = [*encoder, *reversed(encoder[:-1])]
    code = len(encoder) - 2  # index of the layer whose output is the code
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(inputs, outputs))
        if index not in (code, len(sizes) - 2):
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)

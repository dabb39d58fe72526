"""Fully connected classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from .registry import model


@model("mlp")
def mlp(sizes: Sequence[int]) -> nn.Module:
    """Linear layers of the given sizes with ReLU between them; flattens its input, returns logits."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])

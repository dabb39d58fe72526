"""A plain convolutional network, small enough to train many times on one processor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from .registry import model


@model("convnet")
def convnet(widths: Sequence[int], pool_after: Collection[int], classes: int) -> nn.Module:
    """3x3 convolutions with BatchNorm and ReLU, 2x2 max-pools after those numbered (from 1), global average, Linear."""
    layers: list[nn.Module] = []
    channels = 3
    for number, outputs in enumerate(widths, start=1):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
        if number in pool_after:
            layers.append(nn.MaxPool2d(2))
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

"""Residual networks of basic blocks, as He et al. (2016) build them for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .registry import model


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity, or around a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.relu(self.first(x)))
        out: Tensor = self.relu(inner + self.shortcut(x))
        return out


@model("resnet")
def resnet(widths: Sequence[int] = (16, 32, 64), blocks: int = 3, classes: int = 10) -> nn.Module:
    """A convolution, `blocks` basic blocks of each width (each group after the first halves the size), average, Linear."""
    channels = widths[0]
    layers: list[nn.Module] = [_convolution(3, channels, 3), nn.ReLU()]
    for group, outputs in enumerate(widths):
        for number in range(blocks):
            layers.append(BasicBlock(channels, outputs, stride=2 if group and not number else 1))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

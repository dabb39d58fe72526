"""VGG16 with BatchNorm as the paper modifies it for CIFAR-10."""

from __future__ import annotations

import math

from torch import Tensor, nn

from .registry import model

# Output channels of the 13 convolutions, by resolution; a max-pool ends each group.
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Biased 3x3 convolutions with BatchNorm, then Linear-ReLU-Dropout(0.5)-Linear."""

    def __init__(self, width: float, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for group in GROUPS:
            for full_width in group:
                outputs = round(full_width * width)
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(channels, classes)
        )
        self._initialise()

    def _initialise(self) -> None:
        # The Linear layers keep PyTorch's default, as in the paper's K-FAC experiments.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=math.sqrt(2.0 / (9 * module.out_channels)))
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.flatten(1))
        return logits


@model("vgg16bn")
def vgg16bn(width: float = 1.0, classes: int = 10) -> nn.Module:
    """VGG16_bn for 32x32 images; 14,990,922 parameters at width 1 and 10 classes."""
    return VGG(width, classes)

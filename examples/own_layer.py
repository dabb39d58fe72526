"""A layer of one's own in ten lines: said, checked, trained. `python examples/own_layer.py`"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from digits import accuracy, loader


class GatedLinear(nn.Linear):
    """W x + b, times a gate that the input itself opens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True).sigmoid()


@rkfac.register(GatedLinear)
class GatedAdapter(rkfac.layers.ProductAdapter):
    """The gradient at W x + b is that at the output, times the gate."""

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """(..., outputs)."""
        return g * x.mean(-1, keepdim=True).sigmoid()


def train(epochs: int) -> tuple[nn.Module, rkfac.RSKFAC]:
    """A network with two such layers on handwritten digits."""
    torch.manual_seed(0)
    model = nn.Sequential(GatedLinear(64, 128), nn.ReLU(), GatedLinear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = rkfac.RSKFAC(model, lr=0.1)
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, optimizer


if __name__ == "__main__":
    rkfac.testing.check_adapter(GatedLinear(4, 3), torch.randn(5, 2, 4))  # or an AssertionError says what is wrong
    model, optimizer = train(epochs=7)
    print(optimizer.report())
    print(f"own layer: {accuracy(model):.1%} of the test images are recognised")

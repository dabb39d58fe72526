"""Layers of somebody's own, and adapters for them as their author would write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkfac.layers import ChannelScaleAdapter, ProductAdapter, ScaleAdapter


class ScaledLinear(nn.Linear):
    """W (s x) + b, with a scale that is not trained."""

    scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.scale * x, self.weight, self.bias)


class ScaledAdapter(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return module.scale * x


class Gated(nn.Module):
    """(W x + b) sigmoid(v x): the gate's own weights train by the fallback rule."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.w, self.shift = nn.Parameter(0.3 * torch.randn(d_in, d_out)), nn.Parameter(torch.zeros(d_out))
        self.gate = nn.Parameter(0.3 * torch.randn(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + self.shift) * F.linear(x, self.gate).sigmoid()


class GatedAdapter(ProductAdapter):
    weight_name, bias_name, transposed = "w", "shift", True

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return g * F.linear(x, module.gate).sigmoid()


class GLU(nn.Linear):
    """Half of the outputs gate the other half: the gradient at the product is twice as wide as that at the output."""

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(super().forward(x))


class GLUAdapter(ProductAdapter):
    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        value, gate = F.linear(x, module.weight, module.bias).chunk(2, -1)
        s = gate.sigmoid()
        return torch.cat([g * s, g * value * s * (1 - s)], -1)


class Quadratic(nn.Module):
    """W (x (x) x), the weight being (d_out, d, d), without a bias."""

    def __init__(self, d: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(d_out, d, d))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oij,...j->...o", x, self.weight, x)


class QuadraticAdapter(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return (x[..., :, None] * x[..., None, :]).flatten(-2)


class Channels(nn.Linear):
    """A Linear layer on the channels of (n, channels, length)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ChannelsAdapter(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x.movedim(1, -1)

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return g.movedim(1, -1)

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        return g.shape[0] * (g.shape[2] if sharing == "expand" else 1)


class Twice(nn.Linear):
    """W x + W y of an input (..., x and y): one weight at two positions of every output."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.linear(part, self.weight, self.bias) for part in x.chunk(2, -1))


class TwiceAdapter(ProductAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(2, -1), -2)

    def gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return torch.stack([g, g], -2)

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        return super().count(module, g, sharing) * (2 if sharing == "expand" else 1)


class LayerScale(nn.Module):
    """gamma x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


class LayerScaleAdapter(ScaleAdapter):
    weight_name, bias_name = "gamma", None


class PictureScale(nn.Module):
    """weight tanh(x) + bias, by channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width, 1, 1)), nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.tanh() + self.bias


class PictureScaleAdapter(ChannelScaleAdapter):
    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x.tanh()


# The layer, its adapter, the shape of an input.
OWN = {
    "scaled": (lambda: ScaledLinear(4, 3), ScaledAdapter, (5, 4)),
    "scaled, sequences": (lambda: ScaledLinear(4, 3), ScaledAdapter, (5, 2, 4)),
    "scaled, no bias": (lambda: ScaledLinear(4, 3, bias=False), ScaledAdapter, (5, 2, 4)),
    "gated and transposed": (lambda: Gated(4, 3), GatedAdapter, (5, 2, 4)),
    "glu": (lambda: GLU(4, 6), GLUAdapter, (5, 2, 4)),
    "quadratic": (lambda: Quadratic(3, 2), QuadraticAdapter, (5, 3)),
    "channels": (lambda: Channels(4, 3), ChannelsAdapter, (5, 4, 6)),
    "twice": (lambda: Twice(4, 3), TwiceAdapter, (5, 2, 8)),
    "layer scale": (lambda: LayerScale(4), LayerScaleAdapter, (5, 2, 4)),
    "picture scale": (lambda: PictureScale(3), PictureScaleAdapter, (5, 3, 2, 4)),
}

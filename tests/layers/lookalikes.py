"""Modules as other libraries have them, written anew: what is recognised by name or by what its forward does."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """y = x W + b, under the name that it is recognised by."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Transposed(Conv1D):
    """The same, where it can be pickled."""


class OwnRMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class ShiftedRMSNorm(OwnRMSNorm):
    """Scales are 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class ScaleNorm(nn.Module):
    """Without an eps, and its scales have another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * (self.scale + 1)

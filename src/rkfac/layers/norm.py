"""Normalisation layers: scale and shift of each unit as one small Fisher block."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkfac.layers.base import UnitAdapter, by_position, register, statistics_dtype


class _NormAdapter(UnitAdapter):
    """Scale gradients are sum g x_hat, shift gradients sum g, over the positions of a sample."""

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input normalised anew: (output - shift) / scale would break where a scale is zero."""
        raise AssertionError("every norm adapter defines normalised")

    def by_unit(self, module: nn.Module, t: Tensor, sharing: str) -> Tensor:
        """(samples, units, positions)."""
        return t.reshape(t.shape[0], t.shape[1], -1)

    def taken(self, module: nn.Module, t: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
        """The drawn samples, or all."""
        return t if drawn is None else t[drawn]

    def normalised_rows(
        self, module: nn.Module, x: Tensor, dtype: torch.dtype, sharing: str, drawn: Tensor | None
    ) -> Tensor:
        """What was drawn of the normalised input: a sample's normalisation does not ask for the others."""
        return self.normalised(module, self.taken(module, x, sharing, drawn).to(dtype))

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Samples."""
        return g.shape[0]

    def unit_gradients(
        self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None
    ) -> Tensor:
        """(samples, units, 2), or (samples, units, 1) without a trained shift."""
        g = self.taken(module, g, sharing, drawn).to(statistics_dtype(g))
        scale = self.by_unit(module, g * self.normalised_rows(module, x, g.dtype, sharing, drawn), sharing).sum(-1)
        if not self.has_bias(module):
            return scale[..., None]
        return torch.stack([scale, self.by_unit(module, g, sharing).sum(-1)], dim=-1)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormAdapter(_NormAdapter):
    """Batch statistics in training mode, running ones in evaluation mode, as in the forward itself."""

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """By the mean and variance in force."""
        norm = cast(nn.BatchNorm2d, module)
        if norm.training or norm.running_mean is None or norm.running_var is None:
            return F.batch_norm(x, None, None, training=True, eps=norm.eps)
        mean, variance = norm.running_mean.to(x), norm.running_var.to(x)
        return F.batch_norm(x, mean, variance, training=False, eps=norm.eps)

    def normalised_rows(
        self, module: nn.Module, x: Tensor, dtype: torch.dtype, sharing: str, drawn: Tensor | None
    ) -> Tensor:
        """What was drawn after all were normalised together."""
        return self.taken(module, self.normalised(module, x.to(dtype)), sharing, drawn)

    def samples(self, module: nn.Module, x: Tensor) -> int | None:
        """The first dimension."""
        return x.shape[0]


@register(nn.GroupNorm)
class GroupNormAdapter(_NormAdapter):
    """Statistics of a sample's channel groups."""

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """By each group's mean and variance."""
        norm = cast(nn.GroupNorm, module)
        return F.group_norm(x, norm.num_groups, eps=norm.eps)

    def samples(self, module: nn.Module, x: Tensor) -> int | None:
        """The first dimension."""
        return x.shape[0]


class _LastDimensions(_NormAdapter):
    """Units are the trailing dimensions; what stands before them are samples, or samples and positions ("reduce")."""

    def by_unit(self, module: nn.Module, t: Tensor, sharing: str) -> Tensor:
        """(samples, units, positions)."""
        units = cast(nn.LayerNorm, module).normalized_shape
        t = t.flatten(t.ndim - len(units))
        samples = t.shape[0] if sharing == "reduce" and t.ndim > 1 else t[..., 0].numel()
        return t.reshape(samples, -1, t.shape[-1]).mT

    def taken(self, module: nn.Module, t: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
        """The drawn samples; every leading position is one ("expand")."""
        if drawn is None or sharing == "reduce":
            return super().taken(module, t, sharing, drawn)
        return by_position(t, drawn, len(cast(nn.LayerNorm, module).normalized_shape))

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Leading positions, or the first dimension alone."""
        units = cast(nn.LayerNorm, module).normalized_shape
        return g.shape[0] if sharing == "reduce" and g.ndim > len(units) else g.numel() // math.prod(units)


@register(nn.LayerNorm)
class LayerNormAdapter(_LastDimensions):
    """Mean and variance of the trailing dimensions."""

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """By mean and variance."""
        norm = cast(nn.LayerNorm, module)
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


@register(nn.RMSNorm)
class RMSNormAdapter(_LastDimensions):
    """Root mean square of the trailing dimensions."""

    def normalised(self, module: nn.Module, x: Tensor) -> Tensor:
        """By the root mean square."""
        norm = cast(nn.RMSNorm, module)
        return F.rms_norm(x, norm.normalized_shape, eps=norm.eps)

"""Layers that scale and shift each unit, whatever is done to their input before: norms, and scales of one's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rkfac.layers.base import UnitAdapter, by_position, statistics_dtype


class ScaleAdapter(UnitAdapter):
    """y = weight * a + bias, unit by unit; units are the last dimensions, as many as the weight has.

    Scale gradients are sum g a, shift gradients sum g, over the positions of a sample: what stands before the units are
    samples ("expand"), or samples and positions ("reduce"). What one's own says of it:

      inputs            a, what the scale multiplies, given the layer's input; the input itself if nothing is said
      weight_name, bias_name   the parameters' names; bias_name = None: there is no shift
    """

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the scale multiplies, in the shape of the output; a sample's does not ask for other samples."""
        return x

    def units(self, module: nn.Module) -> tuple[int, ...]:
        """The trailing dimensions."""
        return tuple(self.weight(module).shape)

    def by_unit(self, module: nn.Module, t: Tensor, sharing: str) -> Tensor:
        """(samples, units, positions)."""
        units = self.units(module)
        t = t.flatten(t.ndim - len(units))
        samples = t.shape[0] if sharing == "reduce" and t.ndim > 1 else t[..., 0].numel()
        return t.reshape(samples, -1, t.shape[-1]).mT

    def taken(self, module: nn.Module, t: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
        """The drawn samples, or all; every leading position is one ("expand")."""
        if drawn is None:
            return t
        return t[drawn] if sharing == "reduce" else by_position(t, drawn, len(self.units(module)))

    def drawn_inputs(
        self, module: nn.Module, x: Tensor, dtype: torch.dtype, sharing: str, drawn: Tensor | None
    ) -> Tensor:
        """What was drawn of what the scale multiplies."""
        return self.inputs(module, self.taken(module, x, sharing, drawn).to(dtype))

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Leading positions, or the first dimension alone."""
        units = self.units(module)
        return g.shape[0] if sharing == "reduce" and g.ndim > len(units) else g.numel() // math.prod(units)

    @torch.no_grad()
    def unit_gradients(
        self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None
    ) -> Tensor:
        """(samples, units, 2), or (samples, units, 1) without a trained shift."""
        g = self.taken(module, g, sharing, drawn).to(statistics_dtype(g))
        scale = self.by_unit(module, g * self.drawn_inputs(module, x, g.dtype, sharing, drawn), sharing).sum(-1)
        if not self.has_bias(module):
            return scale[..., None]
        return torch.stack([scale, self.by_unit(module, g, sharing).sum(-1)], dim=-1)


class ChannelScaleAdapter(ScaleAdapter):
    """The same with units in the second dimension: (samples, units, positions...)."""

    def by_unit(self, module: nn.Module, t: Tensor, sharing: str) -> Tensor:
        """(samples, units, positions)."""
        return t.reshape(t.shape[0], t.shape[1], -1)

    def taken(self, module: nn.Module, t: Tensor, sharing: str, drawn: Tensor | None) -> Tensor:
        """The drawn samples, or all."""
        return t if drawn is None else t[drawn]

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Samples."""
        return g.shape[0]

    def samples(self, module: nn.Module, x: Tensor) -> int | None:
        """The first dimension."""
        return x.shape[0]

"""Normalisation layers: scale and shift of each unit as one small Fisher block."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkfac import compat
from rkfac.layers.base import Adapter, Uncovered
from rkfac.layers.registry import own_parameters, recognises, register
from rkfac.layers.scale import ChannelScaleAdapter, ScaleAdapter

# Inputs are normalised anew: (output - shift) / scale would break where a scale is zero.


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormAdapter(ChannelScaleAdapter):
    """Batch statistics in training mode, running ones in evaluation mode, as in the forward itself."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """By the mean and variance in force."""
        norm = cast(nn.BatchNorm2d, module)
        if norm.training or norm.running_mean is None or norm.running_var is None:
            return F.batch_norm(x, None, None, training=True, eps=norm.eps)
        mean, variance = norm.running_mean.to(x), norm.running_var.to(x)
        return F.batch_norm(x, mean, variance, training=False, eps=norm.eps)

    def drawn_inputs(
        self, module: nn.Module, x: Tensor, dtype: torch.dtype, sharing: str, drawn: Tensor | None
    ) -> Tensor:
        """What was drawn after all were normalised together."""
        return self.taken(module, self.inputs(module, x.to(dtype)), sharing, drawn)


@register(nn.GroupNorm)
class GroupNormAdapter(ChannelScaleAdapter):
    """Statistics of a sample's channel groups."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """By each group's mean and variance."""
        norm = cast(nn.GroupNorm, module)
        return F.group_norm(x, norm.num_groups, eps=norm.eps)


@register(nn.LayerNorm)
class LayerNormAdapter(ScaleAdapter):
    """Mean and variance of the trailing dimensions."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """By mean and variance."""
        norm = cast(nn.LayerNorm, module)
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


@register(nn.RMSNorm)
class RMSNormAdapter(ScaleAdapter):
    """Root mean square of the trailing dimensions."""

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """By the root mean square."""
        norm = cast(nn.RMSNorm, module)
        return F.rms_norm(x, norm.normalized_shape, eps=norm.eps)


class RMSLikeAdapter(ScaleAdapter):
    """Somebody's own x / sqrt(mean x^2 + eps) * weight, or * (1 + weight): the weight's gradient is the same."""

    bias_name = None

    def __init__(self, weight_name: str, eps: float) -> None:
        self.weight_name, self.eps = weight_name, eps

    def inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        """By the root mean square; an input of zero stays zero."""
        square = x.square().mean(-1, keepdim=True) + self.eps
        return x * square.clamp_min(torch.finfo(x.dtype).tiny).rsqrt()


@recognises
def _rms_like(module: nn.Module) -> Adapter | Uncovered | None:
    """A norm with one vector of scales whose own forward proves to be the formula on inputs where eps counts, and where not.

    What is tried is a copy in float32 with random scales: neither the module nor anybody's random numbers change.
    """
    own = own_parameters(module)
    if "norm" not in compat.kind_of(module).__name__.lower() or len(own) != 1 or any(True for _ in module.children()):
        return None
    ((name, weight),) = own.items()
    if weight.ndim != 1 or not weight.is_floating_point() or any(True for _ in module.buffers()):
        return None
    if weight.is_meta:
        return Uncovered("its forward cannot be tried on the meta device: build the optimizer after moving the model")
    epsilons = {float(v) for v in vars(module).values() if isinstance(v, float) and 0 < v < 1} | {0.0}
    try:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), torch.no_grad():
            found = [eps for eps in sorted(epsilons) if _proves(module, name, weight, eps)]
    except Exception as error:  # whatever somebody's forward may raise
        return Uncovered(
            f"{compat.kind_of(module).__name__}: its forward could not be tried ({type(error).__name__}: {error})"
        )
    if not found:
        return Uncovered(
            f"no adapter for {compat.kind_of(module).__name__}: its forward is not x / sqrt(mean x^2 + eps) times its {name}"
        )
    return RMSLikeAdapter(name, found[-1])  # a smaller one may pass where it is next to nothing


def _proves(module: nn.Module, name: str, weight: Tensor, eps: float) -> bool:
    """Whether a forward is the formula with this eps, for w or 1 + w, in training and in evaluation mode."""
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(len(weight), generator=draw).to(weight.device)
    # The same but for its parameter, which may be sharded and then cannot be copied.
    kind = compat.kind_of(module)
    tried = kind.__new__(kind)
    vars(tried).update(vars(module), _parameters={name: nn.Parameter(w)})
    matches = {0.0, 1.0}
    for scale in (1.0, math.sqrt(eps) if eps else 1e-5):
        # Also pictures, whose channels some norms look for in the second place: no other dimension is as long as the last.
        for shape, training in (((4,), True), ((2, 3), False), ((2, len(w) + 1, 2), True)):
            x = scale * torch.randn(*shape, len(w), generator=draw).to(weight.device)
            y = tried.train(training).forward(x)
            if not isinstance(y, Tensor) or y.shape != x.shape:
                return False
            expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
            size = float(expected.abs().amax())
            matches = {
                m for m in matches if bool(((y - expected * (w + m)).abs() <= 1e-5 * size * (1 + w.abs())).all())
            }
    return len(matches) == 1

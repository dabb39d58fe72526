"""Natural gradients in the backward pass (`apply="backward"`): a layer's `.grad` arrives preconditioned.

The preconditioner is linear and fixed between refreshes, so that it can act on the rows that the weight's gradient is the
sum of. Sums over passes, averages over processes and a gradient scaler's factor commute with it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rkfac import compat
from rkfac.curvature.following import Follower
from rkfac.curvature.hooks import Hook, first_tensor, full_precision
from rkfac.curvature.passed import Passed
from rkfac.linalg import Rowwise


class Preconditioned(Protocol):
    """A layer whose gradients are preconditioned row by row, while `rowwise` says by what."""

    name: str
    module: nn.Module
    weight: nn.Parameter
    bias: bool
    rowwise: Rowwise | None
    natural: bool  # whether .grad got natural gradients since the last step
    wanted: bool  # whether the coming step collects its statistics
    passed: Passed
    follower: Follower | None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight, then bias if it is trained."""


class NaturalHook(Hook):
    """Replaces a Linear layer's output by one that goes another way back."""

    def __init__(self, layer: Preconditioned) -> None:
        super().__init__(None)
        self.layer = layer
        self.silent = False  # another optimizer was built for the layer since

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        layer, x = self.layer, first_tensor((*args, *kwargs.values()))
        if self.silent or layer.rowwise is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        if not isinstance(output, Tensor) or not output.requires_grad or not layer.weight.requires_grad:
            return None
        if module is not layer.module or x is None or compat.inside_functional_transform():
            return None
        weight, bias = (compat.own_parameter(module, name) for name in ("weight", "bias"))
        if weight is not layer.weight or (len(layer.parameters) > 1 and bias is not layer.parameters[1]):
            return None  # other tensors stand in their place for now (functional_call), or for good (pruning)
        if (bias is not None and bias.requires_grad) != layer.bias:
            raise RuntimeError(
                f"the bias of layer {layer.name!r} was frozen or unfrozen, while its gradients are preconditioned together "
                "with the weight's in the backward pass: build a new optimizer, or use apply='step'"
            )
        bias = bias if layer.bias else None
        return _Natural.apply(x, layer.weight, bias, output.detach(), layer, layer.rowwise)


class _Natural(torch.autograd.Function):
    """y = W x + b, which was computed already; backwards sum (G^-1 g)(A^-1 a)^T in the place of sum g a^T."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, layer: Preconditioned, rowwise: Rowwise
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.layer, ctx.rowwise = bias is not None, layer, rowwise
        ctx.mark_dirty(y)  # it is handed on as it is: no view, so that in-place activations may overwrite it
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        layer, rowwise = ctx.layer, ctx.rowwise
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {layer.name!r} has natural gradients in the backward pass, which cannot be differentiated again "
                "(create_graph=True): build the optimizer with apply='step'"
            )
        if rowwise is not layer.rowwise:
            raise RuntimeError(
                f"layer {layer.name!r}: a forward pass from before the last optimizer.step() was differentiated after a "
                "refresh, whose preconditioner is another one: build the optimizer with apply='step'"
            )
        x, weight = ctx.saved_tensors
        with full_precision([g.device]):
            return _Natural._rows(ctx, g, x, weight)

    @staticmethod
    def _rows(ctx: Any, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        layer, rowwise = ctx.layer, ctx.rowwise
        before = (g @ weight.to(g.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return before, None, None, None, None, None
        layer.natural = True
        # float32 or better, whatever autocast did to the forward pass
        arrived, given = (t.reshape(-1, t.shape[-1]).to(rowwise.dtype) for t in (g, x))
        if layer.wanted:  # a step that collects statistics may come to another preconditioner
            layer.passed.add(arrived, given)
        rows, inputs, ones = rowwise.of(arrived, given, ctx.has_bias)
        if layer.follower is not None:
            layer.follower.saw(rows, inputs, ones)
        of_bias = None if ones is None else (rows.mT @ ones).to(weight.dtype)
        return before, (rows.mT @ inputs).to(weight.dtype), of_bias, None, None, None


def silence_others(module: nn.Module) -> None:
    """Of two optimizers on one model the later one, which is about to be built, decides what its gradients are."""
    for hook in compat.forward_hooks(module):
        if isinstance(hook, NaturalHook):
            hook.silent = True

"""The curvature that blocks have at the moment, as operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from rkfac.curvature.block import Block
from rkfac.operators import Curvature, Layer, layer_of, why_not
from rkfac.optim.coverage import LeftOut
from rkfac.optim.report_text import listed


def curvature_of(
    model: nn.Module,
    blocks: Mapping[str, Block],
    reasons: Mapping[str, LeftOut],
    damping: Callable[[Block], float],
    samples: Callable[[Block], int | None] = lambda block: None,
) -> Curvature:
    """Of all layers that have a basis, and why the other parameters have none."""
    names = {id(p): name for name, p in model.named_parameters()}
    layers: dict[str, Layer] = {}
    left_out: dict[str, str] = {}
    for left in reasons.values():
        left_out |= {names[id(p)]: left.reason for p in left.parameters if id(p) in names}
    for name, block in blocks.items():
        why = why_not(block)
        if not why:
            layers[name] = layer_of(block, names, damping(block), samples(block))
        frozen = block.owned if why else block.owned[len(block.parameters) :]
        left_out |= {names[id(p)]: why or "it is frozen (requires_grad=False)" for p in frozen}
    return Curvature(layers, {name: tuple(p.shape) for name, p in model.named_parameters()}, left_out)


def require_known(name: str, blocks: Mapping[str, Block], reasons: Mapping[str, LeftOut]) -> None:
    """Refuse a layer that has no curvature, and say why."""
    if name in reasons and name not in blocks:
        raise ValueError(f"{name!r} has no curvature: {reasons[name].reason}")
    if name not in blocks:
        raise ValueError(f"no preconditioned layer is called {name!r}; there are {listed(blocks)}")
    if why := why_not(blocks[name]):
        raise ValueError(f"layer {name!r} has no curvature at the moment: {why}")

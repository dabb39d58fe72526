"""A block's curvature as a value of its own; blocks that have none of this kind are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from rkfac.curvature.block import Block, EigenBlock, KroneckerBlock, Proximal, UnitBlock
from rkfac.operators.layer import Kronecker, Layer, Moments, Units, one_row, side_of
from rkfac.operators.layout import layout_of, layout_of_units

INSTEAD = "rkfac.fit_curvature(model, batches, loss) collects one that has"


def why_not(block: Block) -> str:
    """Why a layer has no curvature at the moment, or an empty string."""
    if block.retired:
        return block.retired
    if not block.weight.requires_grad:
        return "its weight is frozen (requires_grad=False)"
    if not block.observed:
        return "no statistics yet: no backward pass has reached its weight through a call of it"
    return "" if block.ready else "no decomposition has succeeded yet"


def layer_of(block: Block, names: Mapping[int, str], damping: float, samples: int | None = None) -> Layer:
    """The curvature of a layer that has one (`why_not`); `names` are those of parameters, by identity."""
    common = {
        "name": block.name,
        "parameters": tuple(names[id(p)] for p in block.parameters),
        "rule": block.settings.damping,
        "damping": float(damping),
        "samples": samples,
    }
    return _layer(block, common)


@singledispatch
def _layer(block: Block, common: dict[str, Any]) -> Layer:
    raise ValueError(
        f"layer {block.name!r} has no such operator: a block of the kind {block.kind!r} has no factors with eigenpairs "
        f"(SENG keeps the samples of one batch); {INSTEAD}"
    )


@_layer.register
def _(block: Proximal, common: dict[str, Any]) -> Layer:
    raise ValueError(
        f"layer {block.name!r} has no such operator: KLD-WRM solves with the curvature of each batch blended into the average, "
        f"and no one matrix stands for that; {INSTEAD}"
    )


@_layer.register
def _(block: KroneckerBlock, common: dict[str, Any]) -> Layer:
    return Kronecker(**common, **_two_sided(block))


@_layer.register
def _(block: EigenBlock, common: dict[str, Any]) -> Layer:
    return Moments(**common, **_two_sided(block), moments=block.energies)


@_layer.register
def _(block: UnitBlock, common: dict[str, Any]) -> Layer:
    side, layout = side_of(block.factor), layout_of_units(block.parameters)
    return Units(**common, layout=layout, input=side, output=one_row(side.mean))


def _two_sided(block: KroneckerBlock) -> dict[str, Any]:
    layout = layout_of(block.adapter, block.module, block.parameters)
    return {"layout": layout, "input": side_of(block.input), "output": side_of(block.output)}

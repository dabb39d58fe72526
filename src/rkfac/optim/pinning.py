"""Natural gradients in the backward pass: what the coming ones are preconditioned by, and what becomes of earlier ones.

Gradients and momentum that were preconditioned by the last basis and damping are carried over to the present ones, so that
a step is the same as if plain gradients had been preconditioned in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from rkfac.curvature.block import Block
from rkfac.optim.rules import Rule

Group = Mapping[str, Any]
State = MutableMapping[Any, Any]


def pin(blocks: Iterable[Block], group_of: Mapping[int, Group], state: State, rule: Rule) -> None:
    """Bring every layer's gradients and, where the rule's buffers hold gradients, momentum to its present preconditioner."""
    for block in blocks:
        group = group_of.get(id(block.weight))
        if group is None:
            continue
        before, after = block.rowwise, block.pinned(group) if _together(block, group_of) else None
        arrived = before if block.arrived_natural else None
        if arrived is not after and block.weight.grad is not None:
            block.bring(arrived, after)
        if before is not after and rule.grafts:
            if before is None:
                _move_decay(block, state, -1.0)
            block.carry(_momentum(block, group_of, state, rule), before, after)
            if after is None:
                _move_decay(block, state, 1.0)
        block.hold(after)


def _together(block: Block, group_of: Mapping[int, Group]) -> bool:
    """Whether weight and bias are treated alike: only then can their momentum change coordinates together."""
    groups = [group_of.get(id(p)) for p in block.parameters]
    kinds = {None if g is None else (g.get("momentum"), g.get("nesterov"), g["maximize"]) for g in groups}
    return len(kinds) == 1 and None not in kinds


def _momentum(block: Block, group_of: Mapping[int, Group], state: State, rule: Rule) -> list[Tensor | None]:
    """Of all parameters, or of none: one that has none yet, thawed after the others, takes a part of theirs."""
    if any("momentum_buffer" in state[p] for p in block.parameters if p in state):
        for p in block.parameters:
            rule.prepare(state[p], p, group_of[id(p)])
    return [state[p].get("momentum_buffer") if p in state else None for p in block.parameters]


def _move_decay(block: Block, state: State, sign: float) -> None:
    """Into the buffers or out of them: decay is no part of natural gradients, nor of their momentum."""
    for p in block.parameters:
        if p in state and state[p].get("decay_share"):
            state[p]["momentum_buffer"].add_(p, alpha=sign * state[p]["decay_share"])

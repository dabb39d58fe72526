"""What a step is about to do to each parameter: made as a whole before anything moves, and only then done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.block import Block, Direction
from rkfac.optim import update
from rkfac.optim.gate import Gate, bounded, moderate

Group = Mapping[str, Any]
State = MutableMapping[Any, Any]


@dataclass(frozen=True)
class Preconditioned:
    """A layer's direction, clipped by `factor`, for those of its parameters that have a group and a gradient.

    Each has its momentum buffer, if it has momentum.
    """

    direction: Direction
    factor: Tensor | float
    targets: Sequence[tuple[nn.Parameter, Group, Tensor | None] | None]


@dataclass(frozen=True)
class Plain:
    """A parameter that trains by the fallback rule, within an RMS of `largest` where its layer waits for a basis."""

    parameter: nn.Parameter
    gradient: Tensor
    group: Group
    rule: str
    largest: float | None


Move = Preconditioned | Plain


def planned(
    blocks: Iterable[Block],
    groups: Sequence[dict[str, Any]],
    group_of: Mapping[int, Group],
    names: Mapping[int, str],
    state: State,
    fallback: str,
    gate: Gate,
) -> list[Move]:
    """All moves of one step, with every buffer they need; what is not finite takes no part.

    `group_of` and `names` are those of the parameters, by identity.
    """
    covered: set[int] = set()
    held: dict[int, float] = {}  # largest RMS of layers that wait for their first basis
    made: list[tuple[Block, Preconditioned]] = []
    for block in blocks:
        group = group_of.get(id(block.weight))
        if group is None or block.retired or not block.weight.requires_grad or block.weight.grad is None:
            continue
        if not block.ready:
            if group["update_clip"] is not None:
                held.update((id(p), group["update_clip"]) for p in block.parameters)
            continue
        covered.update(id(p) for p in block.parameters)
        made.append((block, _preconditioned(block, group, group_of, state, gate)))
    return [*_held_together(made, groups[0]["kl_clip"]), *_plain(groups, names, covered, held, state, fallback, gate)]


def _preconditioned(
    block: Block, group: Group, group_of: Mapping[int, Group], state: State, gate: Gate
) -> Preconditioned:
    gradients = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in block.parameters)
    direction = block.direction(gradients, group)
    clip = update.rms_clip(direction.norm, direction.size, group["update_clip"])
    length = direction.norm if clip is None else direction.norm * clip
    finite = bounded(length * _longest(group), block.weight.dtype)
    targets: list[tuple[nn.Parameter, Group, Tensor | None] | None] = []
    for p in block.parameters:
        own = group_of.get(id(p))
        if own is None or p.grad is None:
            targets.append(None)
            continue
        buffer = update.momentum_buffer(state[p], p) if own["momentum"] else None
        targets.append((p, own, buffer))
        if buffer is not None:
            finite = finite & gate.mended(buffer, _longest(own))
    passed = gate.passes(block.name, finite)
    if passed is not True:
        direction = direction.masked(torch.as_tensor(passed, device=block.weight.device))
        clip = None if clip is None else clip.nan_to_num(nan=0.0, posinf=0.0)
    block.clip = clip
    return Preconditioned(direction, 1.0 if clip is None else clip, targets)


def _held_together(made: Sequence[tuple[Block, Preconditioned]], bound: float | None) -> list[Move]:
    """The KL clip over all layers."""
    if bound is None or not made:
        return [move for _, move in made]
    device = made[0][0].weight.device
    terms = []
    for _, move in made:
        lr = next((target[1]["lr"] for target in move.targets if target is not None), 0.0)
        terms.append((lr**2 * move.direction.inner * move.factor).to(device))
    whole = update.kl_clip(terms, bound)
    moves: list[Move] = []
    for block, move in made:
        block.clip = move.factor * whole.to(block.weight.device)
        moves.append(Preconditioned(move.direction, block.clip, move.targets))
    return moves


def _plain(
    groups: Sequence[dict[str, Any]],
    names: Mapping[int, str],
    covered: set[int],
    held: Mapping[int, float],
    state: State,
    fallback: str,
    gate: Gate,
) -> list[Move]:
    moves: list[Move] = []
    for group in groups:
        for p in group["params"]:
            if p.grad is None or id(p) in covered:
                continue
            update.PREPARE[fallback](state[p], p, group)
            gradient = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
            finite = moderate(gradient, fallback == "adamw", _longest(group))
            for buffer in state[p].values():
                finite = finite & gate.mended(buffer, _longest(group)) if isinstance(buffer, Tensor) else finite
            passed = gate.passes(names.get(id(p), "a parameter outside the model"), finite)
            kept = p.grad if passed is True else torch.where(torch.as_tensor(passed, device=p.device), p.grad, 0)
            moves.append(Plain(p, kept, group, fallback, held.get(id(p))))
    return moves


def apply(move: Move, state: State, step: int) -> None:
    """Do it: weight decay, momentum, the update itself."""
    (_apply_direction if isinstance(move, Preconditioned) else _apply_plain)(move, state, step)  # type: ignore[arg-type]


def _apply_direction(move: Preconditioned, state: State, step: int) -> None:
    for index, target in enumerate(move.targets):
        if target is None:
            continue
        p, group, buffer = target
        alone: list[Tensor | None] = [None] * len(move.targets)
        update.decay(p, group, step)
        if buffer is not None:
            alone[index] = buffer.mul_(group["momentum"])
            move.direction.add_to(alone, move.factor)
            p.add_(buffer, alpha=_signed(group))
        else:
            alone[index] = p
            move.direction.add_to(alone, move.factor * _signed(group))


def _apply_plain(move: Plain, state: State, step: int) -> None:
    p, group = move.parameter, move.group
    direction = update.FALLBACKS[move.rule](state[p], move.gradient, group, move.largest)
    update.decay(p, group, step)
    p.add_(direction, alpha=_signed(group) * group["fallback_scale"])


def _longest(group: Group) -> float:
    """What an update or a buffer is multiplied by at most."""
    return max(1.0, float(group["lr"]) * max(1.0, group["fallback_scale"]))


def _signed(group: Group) -> float:
    """-lr, or +lr when the objective is maximised."""
    return float(group["lr"]) if group.get("maximize") else -float(group["lr"])

"""A step is planned as a whole: every direction, clip and buffer is there before anything moves, and an error moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkfac import compat
from rkfac.curvature.block import Block
from rkfac.linalg import SAFE, Truth, at_once
from rkfac.optim import clip
from rkfac.optim.directing import Outset, Step, directed, directed_together, mended
from rkfac.optim.gate import moderate, most
from rkfac.optim.moves import (
    Group,
    Move,
    Plain,
    PlainTogether,
    Preconditioned,
    PreconditionedTogether,
    State,
    Target,
)
from rkfac.optim.rows import OwnRows
from rkfac.optim.rules import Course, longest
from rkfac.optim.scratch import Scratch

SMALL = 1 << 16  # entries of a parameter up to which a call costs more than a pass over it


def planned(
    blocks: Iterable[Block],
    groups: Sequence[dict[str, Any]],
    group_of: Mapping[int, Group],
    names: Mapping[int, str],
    step: Step,
    scratch: Scratch,
) -> list[Move]:
    """All moves of one step, with every buffer they need; what is not finite takes no part.

    `group_of` and `names` are those of the parameters, by identity.
    """
    covered: set[int] = set()
    held: dict[int, float | None] = {}  # largest RMS of layers that wait for their first basis
    whole: list[Outset] = []
    spread: list[Outset] = []
    for block in blocks:
        group = group_of.get(id(block.weight))
        if group is None or block.retired or not block.weight.requires_grad or block.weight.grad is None:
            continue
        if not block.ready:
            held.update((id(p), group["update_clip"]) for p in block.parameters)
            continue
        covered.update(id(p) for p in block.parameters)
        targets = _targets(block, group_of, step.own)
        for target in targets:
            if target is not None:
                step.rules.covered.prepare(step.state[target.parameter], target.parameter, target.group)
        (spread if compat.is_sharded(block.weight) else whole).append(Outset(block, group, targets))
    known = _small_courses(whole, step)
    made = [directed(outset, known, step, scratch) for outset in whole] + directed_together(spread, step)
    clipped = _held_together(made, groups[0]["kl_clip"])
    for move in clipped:
        move.block.stepped()
    moves = _small_together(clipped, known)
    return [*moves, *_plain(groups, names, covered, held, step)]


def _targets(block: Block, group_of: Mapping[int, Group], own: OwnRows) -> list[Target | None]:
    """What moves of a layer, in the order of its parameters."""
    targets: list[Target | None] = []
    for p in block.parameters:
        group, gradient = group_of.get(id(p)), own.gradient(p)
        if group is None or gradient is None:
            targets.append(None)
        else:
            targets.append(Target(own.of(p), -gradient if group["maximize"] else gradient, group))
    return targets


def _small_courses(setting_out: Iterable[Outset], step: Step) -> dict[int, Course]:
    """Of parameters for which calls cost more than passes over them, by their identity: in a few calls for all."""
    alike: dict[Any, list[Target]] = {}
    for block, _, targets in setting_out:
        for target in targets:
            if target is not None and block.rowwise is None and _small(target.parameter):
                alike.setdefault((id(target.group), target.parameter.dtype), []).append(target)
    known: dict[int, Course] = {}
    for same in alike.values():
        states, gradients = [step.state[t.parameter] for t in same], [t.gradient for t in same]
        courses = step.rules.covered.courses([t.parameter for t in same], gradients, states, same[0].group)
        if courses is not None:
            known.update((id(t.parameter), course) for t, course in zip(same, courses, strict=True))
    return known


def _small(p: Tensor) -> bool:
    return at_once(p) and p.numel() <= SMALL and p.dtype.itemsize > 2 and not p.is_complex()


def _small_together(made: Sequence[Preconditioned], known: Mapping[int, Course]) -> list[Move]:
    """Layers whose parameters have known courses and formed directions, those of one group in one go."""
    alike: dict[Any, list[Preconditioned]] = {}
    for move in made:
        kinds = {(id(t.group), t.parameter.dtype) for t in move.moving}
        fits = len(kinds) == 1 and all(id(t.parameter) in known for t in move.moving)
        fits = fits and abs(move.amount) <= SAFE[1] and bool(move.shares())
        alike.setdefault(kinds.pop() if fits else id(move), []).append(move)
    return [same[0] if len(same) == 1 else PreconditionedTogether(same) for same in alike.values()]


def _held_together(made: Sequence[Preconditioned], bound: float | None) -> Sequence[Preconditioned]:
    """The KL clip over all layers."""
    if bound is None or not made:
        return made
    device = made[0].block.weight.device
    terms = []
    for move in made:
        lr = next((target.group["lr"] for target in move.targets if target is not None), 0.0)
        assert move.inner is not None
        term = lr**2 * move.inner * move.factor * move.factor
        terms.append(term.to(device) if isinstance(term, Tensor) else term)
    whole = clip.kl_clip(terms, bound)
    moves: list[Preconditioned] = []
    for move in made:
        block = move.block
        together = whole.to(block.weight.device)
        block.clip = together if block.clip is None else block.clip * together
        moves.append(replace(move, factor=move.factor * together))
    return moves


def _plain(
    groups: Sequence[dict[str, Any]],
    names: Mapping[int, str],
    covered: set[int],
    held: Mapping[int, float | None],
    step: Step,
) -> list[Move]:
    moves: list[Plain] = []
    called: list[str] = []
    for group in groups:
        scaled = {**group, "lr": float(group["lr"]) * group["fallback_scale"]}
        for p in group["params"]:
            gradient = step.own.gradient(p)
            if gradient is None or id(p) in covered:
                continue
            # A layer that waits for its first basis moves at the length it will have with one, where that is known.
            waiting = step.rules.covered.grafts and id(p) in held
            rule, own = (step.rules.covered, group) if waiting else (step.rules.fallback, scaled)
            rows = step.own.of(p)
            rule.prepare(step.state[rows], rows, own)
            # Rows of a sharded parameter within an RMS each are so together.
            moves.append(Plain(Target(rows, gradient, own), rule, held.get(id(p))))
            called.append(names.get(id(p), "a parameter outside the model"))
    finite = _finite(moves, step)
    for index, (name, move) in enumerate(zip(called, moves, strict=True)):
        p, numbers, kept = move.target.parameter, move.target.group, move.target.gradient
        if finite is None:
            step.gate.healthy(name)
        else:
            passed = step.gate.passes(name, finite[index])
            kept = kept if passed is True else torch.where(torch.as_tensor(passed, device=p.device), kept, 0)
        if numbers["maximize"] or kept is not move.target.gradient:
            moves[index] = replace(move, target=Target(p, -kept if numbers["maximize"] else kept, numbers))
    return _together(moves)


def _finite(moves: Sequence[Plain], step: Step) -> Sequence[Truth] | None:
    """Of which parameters gradient and buffers are, None: of all; what is not is taken out of the buffers.

    Rows of a parameter are finite where those of all processes are.
    """
    healthy = _all_moderate(moves, step.state)
    if not moves or (_agreed([healthy], moves, step)[0] if step.own else healthy):
        return None
    fine = [_moderate(move, step) for move in moves]
    fine = _agreed(fine, moves, step) if step.own else fine
    buffers = mended([move.target for move in moves], step, together=bool(step.own))
    return [a & b for a, b in zip(fine, buffers, strict=True)]


def _moderate(move: Plain, step: Step) -> Truth:
    p, gradient, numbers = move.target.parameter, move.target.gradient, move.target.group
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return moderate(gradient, "exp_avg_sq" in step.state[p], longest(numbers))


def _agreed(facts: Sequence[Truth], moves: Sequence[Plain], step: Step) -> list[Truth]:
    """What is true in all processes."""
    told, device = [float(fact) for fact in facts], moves[0].target.parameter.device
    everybody = step.shards.world.gathered(told, device, "whether their gradients are finite")
    return [all(column) for column in zip(*everybody, strict=True)]


def _all_moderate(moves: Sequence[Plain], state: State) -> bool:
    """Whether no gradient or buffer needs a second look: one question for all of them, where it can be answered at once."""
    tensors, limits = [], []
    for move in moves:
        p, gradient = move.target.parameter, move.target.gradient
        if not at_once(p) or p.is_complex():
            return False
        squared = "exp_avg_sq" in state[p]
        for tensor in (gradient, *(b for b in state[p].values() if isinstance(b, Tensor))):
            tensors.append(tensor)
            limits.append(most(tensor.dtype, squared and tensor is gradient, longest(move.target.group)))
    # No entry is larger than the length, which takes a tenth of the time of the largest entry.
    lengths = torch._foreach_norm(tensors) if tensors else []
    return all(length.item() < limit for length, limit in zip(lengths, limits, strict=True))  # False for NaN as well


def _together(moves: Sequence[Plain]) -> list[Move]:
    """Parameters that move by the same rule and numbers, and without a clip, in one go.

    Not in 16 bits on a CPU, where torch steps one by one and rounds elsewhere than in one go.
    """
    alike: dict[Any, list[Plain]] = {}
    for move in moves:
        p = move.target.parameter
        rounded = p.dtype.itemsize <= 2 and p.device.type == "cpu"
        alone = id(p) if move.largest is not None or p.is_complex() or rounded else None
        alike.setdefault((id(move.rule), id(move.target.group), p.device, p.dtype, alone), []).append(move)
    return [same[0] if len(same) == 1 else PlainTogether(same) for same in alike.values()]

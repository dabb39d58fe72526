"""A step is planned as a whole: every direction, clip and buffer is there before anything moves, and an error moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block, Direction
from rkfac.curvature.following import Origin
from rkfac.linalg import SAFE, Number, Truth, at_once, kept, ratio, root
from rkfac.optim import clip
from rkfac.optim.gate import Gate, bounded, moderate, most
from rkfac.optim.moves import (
    Group,
    Move,
    Plain,
    PlainTogether,
    Preconditioned,
    PreconditionedTogether,
    Rules,
    State,
    Target,
)
from rkfac.optim.rules import Course, Curved, longest
from rkfac.optim.scratch import Scratch

SMALL = 1 << 16  # entries of a parameter up to which a call costs more than a pass over it


def planned(
    blocks: Iterable[Block],
    groups: Sequence[dict[str, Any]],
    group_of: Mapping[int, Group],
    names: Mapping[int, str],
    state: State,
    rules: Rules,
    gate: Gate,
    scratch: Scratch,
) -> list[Move]:
    """All moves of one step, with every buffer they need; what is not finite takes no part.

    `group_of` and `names` are those of the parameters, by identity.
    """
    covered: set[int] = set()
    held: dict[int, float | None] = {}  # largest RMS of layers that wait for their first basis
    setting_out: list[tuple[Block, Group, list[Target | None]]] = []
    for block in blocks:
        group = group_of.get(id(block.weight))
        if group is None or block.retired or not block.weight.requires_grad or block.weight.grad is None:
            continue
        if not block.ready:
            held.update((id(p), group["update_clip"]) for p in block.parameters)
            continue
        covered.update(id(p) for p in block.parameters)
        targets = _targets(block, group_of)
        for target in targets:
            if target is not None:
                rules.covered.prepare(state[target.parameter], target.parameter, target.group)
        setting_out.append((block, group, targets))
    known = _small_courses(setting_out, state, rules)
    made = [_preconditioned(*each, known, state, rules, gate, scratch) for each in setting_out]
    moves = _small_together(_held_together(made, groups[0]["kl_clip"]), known)
    return [*moves, *_plain(groups, names, covered, held, state, rules, gate)]


def _targets(block: Block, group_of: Mapping[int, Group]) -> list[Target | None]:
    """What moves of a layer, in the order of its parameters."""
    targets: list[Target | None] = []
    for p in block.parameters:
        own = group_of.get(id(p))
        if own is None or p.grad is None:
            targets.append(None)
        else:
            targets.append(Target(p, -p.grad if own["maximize"] else p.grad, own))
    return targets


def _small_courses(
    setting_out: Iterable[tuple[Block, Group, Sequence[Target | None]]], state: State, rules: Rules
) -> dict[int, Course]:
    """Of parameters for which calls cost more than passes over them, by their identity: in a few calls for all."""
    alike: dict[Any, list[Target]] = {}
    for block, _, targets in setting_out:
        for target in targets:
            if target is not None and block.rowwise is None and _small(target.parameter):
                alike.setdefault((id(target.group), target.parameter.dtype), []).append(target)
    known: dict[int, Course] = {}
    for same in alike.values():
        states = [state[t.parameter] for t in same]
        courses = rules.covered.courses([t.parameter for t in same], [t.gradient for t in same], states, same[0].group)
        if courses is not None:
            known.update((id(t.parameter), course) for t, course in zip(same, courses, strict=True))
    return known


def _small(p: Tensor) -> bool:
    return at_once(p) and p.numel() <= SMALL and p.dtype.itemsize > 2 and not p.is_complex()


def _preconditioned(
    block: Block,
    group: Group,
    targets: list[Target | None],
    known: Mapping[int, Course],
    state: State,
    rules: Rules,
    gate: Gate,
    scratch: Scratch,
) -> Preconditioned:
    courses: list[Course] = []
    natural = block.rowwise is not None
    mended = []  # where nothing can be read buffers are looked through before they are used
    for p, target in zip(block.parameters, targets, strict=True):
        if target is None:
            # What does not move is no part of the course: its gradient has neither the momentum nor the sign of the others.
            courses.append(Course(torch.zeros_like(p)))
            continue
        if not at_once(p):
            mended.append(_mended(state[p], target.group, gate))
        course = known.get(id(p))
        if course is None:
            # The weight's course is in memory that the bias's must not overwrite.
            room = scratch if p is block.weight else Scratch()
            course = rules.covered.course(p, target.gradient, state[p], target.group, room, natural)
        courses.append(course)
    if block.learns:
        shown = zip(targets, courses, strict=True)
        block.learn(tuple(course.vector if t is None else t.gradient for t, course in shown), group)
    spend = courses[0].spend and None not in targets  # what does not move leaves a question to the vector itself
    direction = block.direction(
        tuple(course.vector for course in courses),
        group,
        spend,
        _origin(courses, [t for t in targets if t is not None]),
    )
    factor, length = _scaled(direction, courses, targets, rules.covered.grafts)
    limit = clip.rms_clip(length, direction.size, group["update_clip"])
    if limit is not None:
        factor, length = factor * limit, length * limit
    curved = _curved(block, direction, courses, group) if rules.covered.remembers else ()
    finite: Truth = bounded(length * longest(group), block.weight.dtype)
    for _, tensor in curved:
        finite = finite if tensor is None else finite & moderate(tensor, False, longest(group))
    for fact in (*mended, *(course.finite for course in courses)):
        finite = finite if fact is None else finite & fact
    passed = gate.passes(block.name, finite)
    if passed is not True:
        keep = torch.as_tensor(passed, device=block.weight.device)
        direction = direction.masked(keep)
        curved = [
            Curved(share, None if t is None else torch.where(keep, t, torch.zeros_like(t))) for share, t in curved
        ]
        limit = None if limit is None else torch.as_tensor(limit).nan_to_num(nan=0.0, posinf=0.0)
        factor = kept(factor, keep)
        # What is not finite would stay in the buffers for good.
        targets = [
            t and replace(t, gradient=torch.where(keep, t.gradient, torch.zeros_like(t.gradient))) for t in targets
        ]
        for t in targets:
            if t is not None:
                _mended(state[t.parameter], t.group, gate)
    block.clip = limit
    inner = None if group["kl_clip"] is None else direction.inner  # now: what it was made from is overwritten soon
    return Preconditioned(block, direction, factor, targets, natural, inner, curved)


def _curved(block: Block, direction: Direction, courses: Sequence[Course], group: Group) -> Sequence[Curved]:
    """What the curvature makes of a direction, for each parameter."""
    share, tensors = block.curved(direction, [course.vector for course in courses], group)
    return [Curved(share, None if tensors is None else tensors[index]) for index in range(len(courses))]


def _origin(courses: Sequence[Course], targets: Sequence[Target]) -> Origin | None:
    """Where the courses come from, if that is the same for all parameters of a layer."""
    mixture = courses[0].mixture
    if mixture is None or len(targets) < len(courses) or any(course.mixture != mixture for course in courses):
        return None
    return Origin(mixture, tuple(target.gradient for target in targets))


def _scaled(
    direction: Direction, courses: Sequence[Course], targets: Sequence[Target | None], grafts: bool
) -> tuple[Number, Number]:
    """What the direction is multiplied by to have the length its rule asks for, and that length."""
    if not grafts:
        return 1.0, direction.norm
    squares = [course.square for course in courses if course.square is not None]
    length = root(sum(squares)) if squares else direction.given()
    own = direction.norm
    if None in targets:  # a bias that no group holds is part of what is solved, not of the step
        moving = [index for index, target in enumerate(targets) if target is not None]
        own = direction.norm_of(moving, [course.vector for course in courses])
    return ratio(length, own), length + 0 * direction.norm


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
    state: State,
    rules: Rules,
    gate: Gate,
) -> list[Move]:
    moves: list[Plain] = []
    for group in groups:
        scaled = {**group, "lr": float(group["lr"]) * group["fallback_scale"]}
        for p in group["params"]:
            if p.grad is None or id(p) in covered:
                continue
            # A layer that waits for its first basis moves at the length it will have with one, where that is known.
            waiting = rules.covered.grafts and id(p) in held
            rule, own = (rules.covered, group) if waiting else (rules.fallback, scaled)
            rule.prepare(state[p], p, own)
            moves.append(Plain(Target(p, p.grad, own), rule, held.get(id(p))))
    healthy = _all_moderate(moves, state)
    for index, move in enumerate(moves):
        p, numbers = move.target.parameter, move.target.group
        name, kept = names.get(id(p), "a parameter outside the model"), move.target.gradient
        if healthy:
            gate.healthy(name)
        else:
            gradient = torch.view_as_real(kept) if kept.is_complex() else kept
            finite = moderate(gradient, "exp_avg_sq" in state[p], longest(numbers)) & _mended(state[p], numbers, gate)
            passed = gate.passes(name, finite)
            kept = kept if passed is True else torch.where(torch.as_tensor(passed, device=p.device), kept, 0)
        if numbers["maximize"] or kept is not move.target.gradient:
            moves[index] = replace(move, target=Target(p, -kept if numbers["maximize"] else kept, numbers))
    return _together(moves)


def _all_moderate(moves: Sequence[Plain], state: State) -> bool:
    """Whether no gradient or buffer needs a second look: one question for all of them, where it can be answered at once."""
    tensors, limits = [], []
    for move in moves:
        p, gradient = move.target.parameter, move.target.gradient
        if not at_once(p) or p.is_complex() or p.numel() == 0:
            return False
        squared = "exp_avg_sq" in state[p]
        for tensor in (gradient, *(b for b in state[p].values() if isinstance(b, Tensor))):
            tensors.append(tensor)
            limits.append(most(tensor.dtype, squared and tensor is gradient, longest(move.target.group)))
    # No entry is larger than the length, which takes a tenth of the time of the largest entry.
    lengths = torch._foreach_norm(tensors) if tensors else []
    return all(length.item() < limit for length, limit in zip(lengths, limits, strict=True))  # False for NaN as well


def _together(moves: Sequence[Plain]) -> list[Move]:
    """Parameters that move by the same rule and numbers, and without a clip, in one go."""
    alike: dict[Any, list[Plain]] = {}
    for move in moves:
        p = move.target.parameter
        alone = id(p) if move.largest is not None or p.is_complex() else None
        alike.setdefault((id(move.rule), id(move.target.group), p.device, p.dtype, alone), []).append(move)
    return [same[0] if len(same) == 1 else PlainTogether(same) for same in alike.values()]


def _mended(state: State, group: Group, gate: Gate) -> Truth:
    """Whether all buffers are finite; those that are not become zero."""
    finite: Truth = True
    for buffer in state.values():
        if isinstance(buffer, Tensor):
            finite = gate.mended(buffer, longest(group)) & finite
    if "decay_share" in state and at_once(state["momentum_buffer"]) and not bool(finite):
        state["decay_share"] = 0.0  # what the buffer held of the weight is gone with it
    return finite

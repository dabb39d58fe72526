"""From what a rule wants preconditioned to a layer's move: its direction, as long as the rule says, if it is finite.

A layer whose rows are spread over processes is brought together by its owner, who makes the direction of the whole, and
everybody takes its rows of it; all numbers that decide anything are everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rkfac.curvature.block import Block, Direction
from rkfac.curvature.following import Origin
from rkfac.distributed import Shards
from rkfac.linalg import Number, Truth, Whole, at_once, kept, ratio, root
from rkfac.optim import clip
from rkfac.optim.gate import Gate, bounded, moderate
from rkfac.optim.moves import Group, Preconditioned, Rules, State, Target
from rkfac.optim.rows import OwnRows
from rkfac.optim.rules import Course, Curved, longest
from rkfac.optim.scratch import Scratch


class Outset(NamedTuple):
    """A layer that takes a step, with what moves of it in the order of its parameters."""

    block: Block
    group: Group
    targets: list[Target | None]

    @property
    def moving(self) -> list[int]:
        """Numbers of the parameters that move."""
        return [index for index, target in enumerate(self.targets) if target is not None]


class Courses(NamedTuple):
    """What is preconditioned of a layer, one a parameter, and what was seen of buffers where nothing can be read."""

    each: list[Course]
    mended: list[Truth]

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """What goes into the preconditioner."""
        return tuple(course.vector for course in self.each)

    @property
    def facts(self) -> list[Truth]:
        """All that must be true for a step, where the vectors themselves do not show it."""
        return [fact for fact in (*self.mended, *(course.finite for course in self.each)) if fact is not None]


@dataclass(frozen=True)
class Step:
    """What all layers of one step have in common."""

    own: OwnRows
    rules: Rules
    gate: Gate
    shards: Shards

    @property
    def state(self) -> State:
        """Buffers of the parameters, by this process's rows of them."""
        return self.own.state


def directed(outset: Outset, known: Mapping[int, Course], step: Step, scratch: Scratch) -> Preconditioned:
    """The move of a layer that this process has whole; `known` are courses that were made for many at once."""
    block, group, targets = outset
    courses = _courses(outset, known, step, scratch)
    if block.learns:
        shown = zip(targets, courses.each, strict=True)
        block.learn(tuple(course.vector if t is None else t.gradient for t, course in shown), group)
    spend = courses.each[0].spend and None not in targets  # what does not move leaves a question to the vector itself
    direction = block.direction(
        courses.vectors, group, spend, _origin(courses.each, [t for t in targets if t is not None])
    )
    return _settled(outset, direction, courses, step)


def directed_together(outsets: Sequence[Outset], step: Step) -> list[Preconditioned]:
    """The moves of layers of which every process has some rows."""
    shards = step.shards
    if not outsets:
        return []
    started = [_courses(outset, {}, step, None) for outset in outsets]
    layers = shards.spread([o.block for o in outsets], [courses.vectors[0].dtype for courses in started])
    rows = [[v.to(layer.dtype) for v in courses.vectors] for layer, courses in zip(layers, started, strict=True)]
    whole = shards.brought(layers, rows)
    made = {number: _Made.of(outsets[number], tensors) for number, tensors in whole.items()}
    said = [n for number, courses in enumerate(started) for n in _said(courses, made.get(number))]
    everybody = shards.world.gathered(
        said, rows[0][0].device, f"lengths of steps, that of {layers[0].name!r} among them"
    )
    parts = shards.returned(layers, {number: one.tensors for number, one in made.items()})
    moves, at = [], 0
    for number, (outset, courses) in enumerate(zip(outsets, started, strict=True)):
        count = len(courses.each)
        told = [row[at : at + 1 + count + _NUMBERS] for row in everybody]
        at += 1 + count + _NUMBERS
        direction = _Rows.of(outset, parts[number], told[layers[number].owner][1 + count :])
        finite = all(row[0] for row in told)
        squares = [sum(row[1 + index] for row in told) for index in range(count)]
        each = [
            course._replace(square=None if course.square is None else square, finite=finite)
            for course, square in zip(courses.each, squares, strict=True)
        ]
        moves.append(_settled(outset, direction, Courses(each, []), step))
    return moves


_NUMBERS = 5  # that an owner says of a direction


@dataclass(frozen=True)
class _Made:
    """The direction of a whole layer, formed, and the numbers that go with it."""

    tensors: list[Tensor]
    numbers: list[float]

    @classmethod
    def of(cls, outset: Outset, vectors: Sequence[Tensor]) -> _Made:
        block, group, targets = outset
        made = block.direction(tuple(vectors), group)
        with block.timed("apply"):
            tensors = [torch.zeros_like(vector) for vector in vectors]
            for index, (tensor, vector) in enumerate(zip(tensors, vectors, strict=True)):
                made.parts[index].add_to(tensor, 1.0, [(vector, 1.0)])
        inner = 0.0 if group["kl_clip"] is None else made.along()
        moving = made.norm_of(outset.moving, vectors) if None in targets else made.norm
        return cls(tensors, [float(n) for n in (made.scale, made.length, made.given(), inner, moving)])


@dataclass(frozen=True, eq=False)
class _Rows(Direction):
    """This process's rows of a direction that another may have made; its lengths are those of the whole."""

    moving: float = 0.0

    @classmethod
    def of(cls, outset: Outset, tensors: Sequence[Tensor], numbers: Sequence[float]) -> _Rows:
        scale, length, given, along, moving = numbers
        size = sum(p.numel() for p in outset.block.parameters)
        parts = tuple(Whole(tensor) for tensor in tensors)
        return cls(parts, scale, size, lambda: given, length, lambda: along, moving)

    def norm_of(self, indices: Sequence[int], vectors: Sequence[Tensor]) -> Number:
        """As the owner found it for what moves."""
        return self.moving


def _said(courses: Courses, made: _Made | None) -> list[float]:
    """What a process says of one layer: whether its rows are fine, the squares of their lengths, and what its owner found."""
    squares = [0.0 if course.square is None else float(course.square) for course in courses.each]
    return [float(all(map(bool, courses.facts))), *squares, *([0.0] * _NUMBERS if made is None else made.numbers)]


def _courses(outset: Outset, known: Mapping[int, Course], step: Step, scratch: Scratch | None) -> Courses:
    """What the rule wants preconditioned; without `scratch` every course has memory of its own."""
    block, _, targets = outset
    courses: list[Course] = []
    natural = block.rowwise is not None
    mended = []  # where nothing can be read buffers are looked through before they are used
    for parameter, target in zip(block.parameters, targets, strict=True):
        if target is None:
            # What does not move is no part of the course: its gradient has neither the momentum nor the sign of the others.
            courses.append(Course(torch.zeros_like(step.own.of(parameter))))
            continue
        p = target.parameter
        if not at_once(p):
            mended.append(mend(step.state[p], target.group, step.gate))
        course = known.get(id(p))
        if course is None:
            # The weight's course is in memory that the bias's must not overwrite.
            room = scratch if scratch is not None and parameter is block.weight else Scratch()
            course = step.rules.covered.course(p, target.gradient, step.state[p], target.group, room, natural)
        courses.append(course)
    return Courses(courses, mended)


def _settled(outset: Outset, direction: Direction, courses: Courses, step: Step) -> Preconditioned:
    """A direction becomes a move: its length, its clip, and whether all of it is finite."""
    (block, group, targets), gate, covered = outset, step.gate, step.rules.covered
    factor, length = _scaled(direction, courses, outset, covered.grafts)
    limit = clip.rms_clip(length, direction.size, group["update_clip"])
    if limit is not None:
        factor, length = factor * limit, length * limit
    curved = _curved(block, direction, courses, group) if covered.remembers else ()
    finite: Truth = bounded(length * longest(group), block.weight.dtype)
    for _, tensor in curved:
        finite = finite if tensor is None else finite & moderate(tensor, False, longest(group))
    for fact in courses.facts:
        finite = finite & fact
    passed = gate.passes(block.name, finite)
    if passed is not True:
        keep = torch.as_tensor(passed, device=block.weight.device)
        direction = direction.masked(keep)
        curved = [Curved(part, None if t is None else torch.where(keep, t, torch.zeros_like(t))) for part, t in curved]
        limit = None if limit is None else torch.as_tensor(limit).nan_to_num(nan=0.0, posinf=0.0)
        factor = kept(factor, keep)
        # What is not finite would stay in the buffers for good.
        targets = [
            t and replace(t, gradient=torch.where(keep, t.gradient, torch.zeros_like(t.gradient))) for t in targets
        ]
        mended([t for t in targets if t is not None], step, together=isinstance(direction, _Rows))
    block.clip = limit
    inner = None if group["kl_clip"] is None else direction.inner  # now: what it was made from is overwritten soon
    return Preconditioned(block, direction, factor, targets, block.rowwise is not None, inner, curved)


def _curved(block: Block, direction: Direction, courses: Courses, group: Group) -> Sequence[Curved]:
    """What the curvature makes of a direction, for each parameter."""
    part, tensors = block.curved(direction, courses.vectors, group)
    return [Curved(part, None if tensors is None else tensors[index]) for index in range(len(courses.each))]


def _origin(courses: Sequence[Course], targets: Sequence[Target]) -> Origin | None:
    """Where the courses come from, if that is the same for all parameters of a layer."""
    mixture = courses[0].mixture
    if mixture is None or len(targets) < len(courses) or any(course.mixture != mixture for course in courses):
        return None
    return Origin(mixture, tuple(target.gradient for target in targets))


def _scaled(direction: Direction, courses: Courses, outset: Outset, grafts: bool) -> tuple[Number, Number]:
    """What the direction is multiplied by to have the length its rule asks for, and that length."""
    if not grafts:
        return 1.0, direction.norm
    squares = [course.square for course in courses.each if course.square is not None]
    length = root(sum(squares)) if squares else direction.given()
    own = direction.norm
    if None in outset.targets:  # a bias that no group holds is part of what is solved, not of the step
        own = direction.norm_of(outset.moving, courses.vectors)
    return ratio(length, own), length + 0 * direction.norm


def mended(targets: Sequence[Target], step: Step, together: bool) -> list[Truth]:
    """Whether the buffers of each are finite; those that are not become zero, in every process that has rows of them."""
    found: list[Truth] = [mend(step.state[t.parameter], t.group, step.gate) for t in targets]
    if not together or not targets:
        return found
    told, device = [float(fine) for fine in found], targets[0].parameter.device
    columns = zip(*step.shards.world.gathered(told, device, "whether their buffers are finite"), strict=True)
    fine = [all(column) for column in columns]
    for target, good in zip(targets, fine, strict=True):
        if not good:
            _clear(step.state[target.parameter])
    return list(fine)


def _clear(state: State) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.zero_()
        elif key == "decay_share":
            state[key] = 0.0


def mend(state: State, group: Group, gate: Gate) -> Truth:
    """Whether all buffers are finite; those that are not become zero."""
    finite: Truth = True
    for buffer in state.values():
        if isinstance(buffer, Tensor):
            finite = gate.mended(buffer, longest(group)) & finite
    if "decay_share" in state and at_once(state["momentum_buffer"]) and not bool(finite):
        state["decay_share"] = 0.0  # what the buffer held of the weight is gone with it
    return finite

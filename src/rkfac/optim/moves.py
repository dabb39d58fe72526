"""What a step does to each parameter, once all of it is planned."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block, Direction
from rkfac.linalg import Number, Terms, Whole
from rkfac.optim.rules import Curved, Rule, decay_of

Group = Mapping[str, Any]
State = MutableMapping[Any, Any]


@dataclass(frozen=True)
class Rules:
    """How preconditioned layers move, and how everything else does; `step` says whether decay has begun."""

    covered: Rule
    fallback: Rule
    step: int


@dataclass(frozen=True)
class Target:
    """A parameter that moves."""

    parameter: Tensor  # or this process's rows of it
    gradient: Tensor
    group: Group


@dataclass(frozen=True)
class Preconditioned:
    """A layer's direction, `factor` times as long, for those of its parameters that have a group and a gradient."""

    block: Block
    direction: Direction
    factor: Number
    targets: Sequence[Target | None]
    natural: bool
    inner: Number | None  # <S, J>, for the KL clip
    curved: Sequence[Curved] = ()  # the curvature times the direction, for a rule that remembers

    @property
    def moving(self) -> list[Target]:
        """What moves."""
        return [target for target in self.targets if target is not None]

    @property
    def amount(self) -> float:
        """What its parts are multiplied by on their way to the parameters; infinite where nobody can read it."""
        known = not isinstance(self.factor, Tensor) and not isinstance(self.direction.scale, Tensor)
        return float(-self.moving[0].group["lr"] * self.factor * self.direction.scale) if known else math.inf

    def shares(self) -> list[tuple[Tensor, Tensor]]:
        """Places in the parameters, and what belongs there; none where a part has no place."""
        parts = [
            (part, t.parameter) for part, t in zip(self.direction.parts, self.targets, strict=True) if t is not None
        ]
        found = [(part.place(p), part.tensor) for part, p in parts if isinstance(part, Whole)]
        shares = [(place, tensor) for place, tensor in found if place is not None]
        return shares if len(shares) == len(parts) else []

    def apply(self, state: State, rules: Rules) -> None:
        """Do it."""
        for index, target in enumerate(self.targets):
            if target is not None:
                p, group = target.parameter, target.group
                add = partial(self._add, index)
                rules.covered.follow(
                    p, target.gradient, state[p], group, decay_of(group, rules.step), add, self.natural
                )
                if self.curved:
                    share, tensor = self.curved[index]
                    rules.covered.remember(target.gradient, state[p], group, Curved(self.factor * share, tensor))

    def _add(self, index: int, to: Tensor, factor: float, terms: Terms, keep: float) -> None:
        with self.block.timed("apply"):
            self.direction.add_to(index, to, self.factor * factor, terms, keep)


@dataclass(frozen=True)
class PreconditionedTogether:
    """Small layers of one group whose directions are formed."""

    moves: Sequence[Preconditioned]

    @property
    def moving(self) -> list[Target]:
        """What moves."""
        return [target for move in self.moves for target in move.moving]

    def apply(self, state: State, rules: Rules) -> None:
        """Do it in a few calls for all."""
        begin, targets, group = time.perf_counter(), self.moving, self.moving[0].group
        parameters: list[Tensor] = [target.parameter for target in targets]
        states, decay = [state[p] for p in parameters], decay_of(group, rules.step)
        keeps = rules.covered.follow_together(parameters, [t.gradient for t in targets], states, group, decay)
        if any(keep != 1.0 for keep in keeps):
            torch._foreach_mul_(parameters, keeps)
        shares = [(share, move.amount) for move in self.moves for share in move.shares()]
        tensors = [tensor for (_, tensor), _ in shares]
        torch._foreach_mul_(tensors, [amount for _, amount in shares])
        torch._foreach_add_([place for (place, _), _ in shares], tensors)
        each = (time.perf_counter() - begin) / len(self.moves)
        for move in self.moves:
            move.block.spent("apply", each)


@dataclass(frozen=True)
class Plain:
    """A parameter that trains without a preconditioner, within an RMS of `largest` where its layer waits for a basis."""

    target: Target
    rule: Rule
    largest: float | None

    @property
    def moving(self) -> list[Target]:
        """What moves."""
        return [self.target]

    def apply(self, state: State, rules: Rules) -> None:
        """Do it."""
        p, group = self.target.parameter, self.target.group
        self.rule.plain(p, self.target.gradient, state[p], group, decay_of(group, rules.step), self.largest)


@dataclass(frozen=True)
class PlainTogether:
    """Plain parameters of one rule and group."""

    moves: Sequence[Plain]

    @property
    def moving(self) -> list[Target]:
        """What moves."""
        return [move.target for move in self.moves]

    def apply(self, state: State, rules: Rules) -> None:
        """Do it in a few calls for all."""
        targets, group = self.moving, self.moves[0].target.group
        self.moves[0].rule.plain_together(
            [t.parameter for t in targets],
            [t.gradient for t in targets],
            [state[t.parameter] for t in targets],
            group,
            decay_of(group, rules.step),
        )


Move = Preconditioned | PreconditionedTogether | Plain | PlainTogether

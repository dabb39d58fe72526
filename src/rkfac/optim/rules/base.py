"""How a gradient becomes a step: torch's SGD, torch's AdamW, or the preconditioner's own length (the paper).

A rule moves a plain parameter just as torch does. For a preconditioned layer it says what is preconditioned (its `course`:
the gradient with the momentum of the rule) and how long the result shall be; direction is all that differs from the plain
optimizer, so that its learning rate, momentum, decay and schedule keep their meaning. Momentum comes before the
preconditioner: directions of K-FAC agree with one another more than gradients do, and their sum would be a longer step
than that of SGD or AdamW. Courses change nothing: all of them are made before any parameter or buffer moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from rkfac.curvature.following import Mixture
from rkfac.linalg import SAFE, Number, Terms, Truth, at_once
from rkfac.optim.scratch import Scratch

Group = Mapping[str, Any]
State = MutableMapping[str, Any]
# target <- keep * target + factor * direction, in place; the terms add up to what the direction was made from.
Add = Callable[[Tensor, float, Terms, float], object]


class Curved(NamedTuple):
    """The damped curvature times the step that was taken, for one parameter: `share` times the vector, or a tensor."""

    share: Number
    tensor: Tensor | None = None


class Course(NamedTuple):
    """What is preconditioned, and the square of the length that the result shall have.

    `square` None: the vector's own, or, under a rule that does not graft, the preconditioner's. `spend`: the vector is in
    memory that may be overwritten. `finite`: whether everything else the rule will use is; None: the vector shows it.
    `mixture`: what the vector and the coming momentum are of gradient and momentum; None: something else is in them.
    """

    vector: Tensor
    square: Number | None = None
    spend: bool = False
    finite: Truth | None = None
    mixture: Mixture | None = None


class Rule(ABC):
    """One rule; its buffers live in the optimizer's `state`, its numbers in the parameter groups."""

    grafts: ClassVar[bool] = True  # whether it says how long a preconditioned step is
    beside: ClassVar[frozenset[str]] = (
        frozenset()
    )  # what it keeps beside momentum of a parameter that is preconditioned
    remembers: ClassVar[bool] = False  # whether it wants to know what the curvature makes of each step

    @abstractmethod
    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """Make the buffers a step needs before anything moves: there may be no memory for them."""

    @abstractmethod
    def plain(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, largest: float | None
    ) -> None:
        """A whole step without a preconditioner, its direction within an RMS of `largest`."""

    def plain_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> None:
        """The same for parameters that share their numbers, without a clip."""
        for p, gradient, state in zip(parameters, gradients, states, strict=True):
            self.plain(p, gradient, state, group, decay, None)

    @abstractmethod
    def course(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, scratch: Scratch, natural: bool
    ) -> Course:
        """What is to be preconditioned; changes nothing. `natural`: gradient and buffers are preconditioned already."""

    def courses(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group
    ) -> list[Course] | None:
        """The same for parameters that share their numbers, each in memory of its own; None: there is no quicker way."""
        return None

    @abstractmethod
    def follow(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add, natural: bool
    ) -> None:
        """The step along the preconditioned course."""

    def follow_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> list[float]:
        """The same for parameters that `courses` served: each becomes keep * itself - lr * direction; returns the keeps."""
        raise NotImplementedError("this rule has courses of its own for each parameter")

    def remember(self, gradient: Tensor, state: State, group: Group, curved: Curved) -> None:
        """The step was taken; for rules that remember."""
        raise NotImplementedError("this rule asks for nothing after a step")

    def went_on(self, state: State, product: Tensor) -> None:
        """The step went further than its direction: by d / lr, which the curvature makes `product` of."""
        raise NotImplementedError("this rule asks for nothing after a step")


def decay_of(group: Group, step: int) -> float:
    """Weight decay, once it has begun."""
    return float(group["weight_decay"]) if step >= group["weight_decay_from"] else 0.0


def longest(group: Group) -> float:
    """What an update or a buffer is multiplied by at most."""
    return max(1.0, float(group["lr"]) * max(1.0, group["fallback_scale"]))


def square_of(vector: Tensor) -> Number:
    """The squared length, whatever the size of the entries."""
    if not at_once(vector):
        return torch.linalg.vector_norm(vector, dtype=torch.float64).square()
    # Not in 16 bits, in which the length itself would be rounded.
    length = torch.linalg.vector_norm(vector, dtype=None if vector.dtype.itemsize > 2 else torch.float32).item()
    if not SAFE[0] < length < SAFE[1]:  # thirty times slower, and seldom needed
        length = torch.linalg.vector_norm(vector, dtype=torch.float64).item()
    return length * length

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

from rkfac.optim.clip import within
from rkfac.optim.gate import Gate

Group = Mapping[str, Any]
State = MutableMapping[str, Any]
Add = Callable[[Tensor, float], object]  # target += factor * direction


class Course(NamedTuple):
    """What is preconditioned, and the square of the length that the result shall have (None: its own)."""

    vector: Tensor
    square: Tensor | None


class Rule(ABC):
    """One rule; its buffers live in the optimizer's `state`, its numbers in the parameter groups."""

    grafts: ClassVar[bool] = True  # whether it says how long a preconditioned step is

    @abstractmethod
    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """Make the buffers a step needs before anything moves: there may be no memory for them."""

    @abstractmethod
    def plain(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, largest: float | None
    ) -> None:
        """A whole step without a preconditioner, its direction within an RMS of `largest`."""

    @abstractmethod
    def course(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float) -> Course:
        """What is to be preconditioned; changes nothing."""

    @abstractmethod
    def follow(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add) -> None:
        """The step along the preconditioned course."""


class Own(Rule):
    """The preconditioner's own length: momentum of the directions, decay apart from both (paper's Algorithm 4)."""

    grafts = False

    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """The running sum of directions."""
        if group["momentum"] and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def plain(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, largest: float | None
    ) -> None:
        """The gradient in the direction's place."""
        gradient = within(gradient, largest)
        self._step(p, state, group, decay, lambda target, factor: target.add_(gradient, alpha=factor))

    def course(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float) -> Course:
        """The gradient."""
        return Course(gradient, None)

    def follow(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add) -> None:
        """theta <- (1 - lr w) theta - lr (direction, or its momentum)."""
        self._step(p, state, group, decay, add)

    def _step(self, p: Tensor, state: State, group: Group, decay: float, add: Add) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        if decay:
            p.mul_(1 - lr * decay)
        if not momentum:
            add(p, -lr)
            return
        buffer: Tensor = state["momentum_buffer"].mul_(momentum)
        add(buffer, 1.0)
        p.add_(buffer, alpha=-lr * momentum if group["nesterov"] else -lr)
        if group["nesterov"]:
            add(p, -lr)


class SGD(Rule):
    """torch.optim.SGD; a preconditioned layer keeps SGD's buffer and takes a step of SGD's length.

    The decay, which torch adds to the gradient, is left out of what is preconditioned and added again afterwards:
    `decay_share` is how many times the parameter its momentum buffer holds (but for how far the parameter has moved
    within the buffer's memory).
    """

    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """torch's buffer."""
        if group["momentum"] and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["decay_share"] = 0.0

    def plain(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, largest: float | None
    ) -> None:
        """Bit for bit torch's, where there is no clip."""
        p.add_(within(self._remember(p, gradient, state, group, decay), largest), alpha=-float(group["lr"]))

    def _remember(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float) -> Tensor:
        """Bring the buffer up to date; torch's direction."""
        if decay:
            gradient = gradient.add(p, alpha=decay)
        momentum = group["momentum"]
        if not momentum:
            return gradient
        state["decay_share"] = momentum * state["decay_share"] + decay
        buffer: Tensor = state["momentum_buffer"].mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer

    def _share(self, state: State, group: Group, decay: float) -> float:
        """How many times the parameter is in the coming step."""
        momentum = group["momentum"]
        if not momentum:
            return decay
        held: float = momentum * state["decay_share"] + decay
        return decay + momentum * held if group["nesterov"] else held

    def course(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float) -> Course:
        """torch's direction without its decay, at its own length."""
        momentum, vector = group["momentum"], gradient
        if momentum:
            ahead = 1 + momentum if group["nesterov"] else 1.0
            vector = gradient * ahead
            vector.add_(state["momentum_buffer"], alpha=momentum**2 if group["nesterov"] else momentum)
            # The gradient's own share of decay is not in it yet.
            held = self._share(state, group, decay) - ahead * decay
            if held:
                vector.sub_(p, alpha=held)
        return Course(vector, square_of(vector))

    def follow(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add) -> None:
        """theta <- theta - lr (direction + share of decay * theta)."""
        lr, share = float(group["lr"]), self._share(state, group, decay)
        if group["momentum"]:
            self._remember(p, gradient, state, group, decay)
        if share:
            p.mul_(1 - lr * share)
        add(p, -lr)


class AdamW(Rule):
    """torch.optim.AdamW; a preconditioned layer keeps both moments and takes a step of AdamW's length."""

    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """torch's moments; a complex number counts as its two real parts."""
        if "exp_avg" not in state:
            like = torch.view_as_real(p) if p.is_complex() else p
            first, second = torch.zeros_like(like), torch.zeros_like(like)
            state["exp_avg"], state["exp_avg_sq"], state["adam_step"] = first, second, 0

    def plain(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, largest: float | None
    ) -> None:
        """Bit for bit torch's."""
        lr = float(group["lr"])
        if decay:
            p.mul_(1 - lr * decay)
        if p.is_complex():
            p, gradient = torch.view_as_real(p), torch.view_as_real(gradient)
        self._remember(gradient, state, group)
        mean, denominator, correction = self._moments(state["exp_avg"], state["exp_avg_sq"], state["adam_step"], group)
        if largest is None:
            p.addcdiv_(mean, denominator, value=-(lr / correction))
        else:
            p.add_(within((mean / correction).div_(denominator), largest), alpha=-lr)

    def _remember(self, gradient: Tensor, state: State, group: Group) -> None:
        first, second = group["betas"]
        state["adam_step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def _moments(self, mean: Tensor, square: Tensor, step: int, group: Group) -> tuple[Tensor, Tensor, float]:
        """The first moment, the denominator, and what the first moment has still to be divided by."""
        first, second = group["betas"]
        denominator = (square.sqrt() / (1 - second**step) ** 0.5).add_(group["eps"])
        return mean, denominator, 1 - first**step

    def course(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float) -> Course:
        """The first moment, at the length of AdamW's direction."""
        first, second = group["betas"]
        mean = state["exp_avg"].lerp(gradient, 1 - first)
        square = (state["exp_avg_sq"] * second).addcmul_(gradient, gradient, value=1 - second)
        _, denominator, correction = self._moments(mean, square, state["adam_step"] + 1, group)
        return Course(mean, square_of(torch.div(mean, denominator, out=square)) / correction**2)

    def follow(self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add) -> None:
        """theta <- (1 - lr w) theta - lr direction."""
        lr = float(group["lr"])
        self._remember(gradient, state, group)
        if decay:
            p.mul_(1 - lr * decay)
        add(p, -lr)


GRAFTS: dict[str | None, Rule] = {None: Own(), "sgd": SGD(), "adamw": AdamW()}


def fallback_rule(graft: str | None, fallback: str) -> Rule:
    """The rule of parameters no block covers."""
    return GRAFTS[None] if graft is None and fallback == "sgd" else GRAFTS[fallback]


def decay_of(group: Group, step: int) -> float:
    """Weight decay, once it has begun."""
    return float(group["weight_decay"]) if step >= group["weight_decay_from"] else 0.0


SAFE = (1e-15, 1e15)  # lengths whose square float32 can hold


def square_of(vector: Tensor) -> Tensor:
    """The squared length in float64, whatever the size of the entries."""
    if not Gate.at_once(vector):
        return torch.linalg.vector_norm(vector, dtype=torch.float64).square()
    # Not in 16 bits, in which the length itself would be rounded.
    length = torch.linalg.vector_norm(vector, dtype=None if vector.dtype.itemsize > 2 else torch.float32).double()
    if not SAFE[0] < float(length) < SAFE[1]:  # thirty times slower, and seldom needed
        length = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return length.square()

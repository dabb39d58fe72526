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

from rkfac.curvature.following import Blend, Mixture
from rkfac.linalg import SAFE, Number, Terms, Truth, at_once
from rkfac.optim.clip import within
from rkfac.optim.gate import moderate
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

        def add(target: Tensor, factor: float, terms: Terms, keep: float) -> None:
            (target if keep == 1.0 else target.mul_(keep)).add_(gradient, alpha=factor)

        self.follow(p, gradient, state, group, decay, add, False)

    def course(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, scratch: Scratch, natural: bool
    ) -> Course:
        """The gradient."""
        finite = moderate(state["momentum_buffer"], False, longest(group)) if group["momentum"] else None
        # A natural gradient of its own length is asked for nothing.
        return Course(gradient, finite=finite, mixture=None if natural else Mixture(Blend(1.0, 0.0), None))

    def _terms(self, gradient: Tensor, state: State, group: Group) -> Terms:
        """What the vector was that is preconditioned."""
        return ((gradient, 1.0),)

    def follow(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add, natural: bool
    ) -> None:
        """theta <- (1 - lr w) theta - lr (direction, or its momentum)."""
        lr, momentum = float(group["lr"]), group["momentum"]
        terms, keep = self._terms(gradient, state, group), 1 - lr * decay
        if not momentum:
            add(p, -lr, terms, keep)
            return
        buffer: Tensor = state["momentum_buffer"]
        add(buffer, 1.0, terms, momentum)
        if keep != 1.0:
            p.mul_(keep)
        p.add_(buffer, alpha=-lr * momentum if group["nesterov"] else -lr)
        if group["nesterov"]:
            add(p, -lr, terms, 1.0)


class Coupled(Own):
    """torch.optim.SGD around the preconditioner: the decay joins the direction before momentum adds them up (SENG)."""

    def follow(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add, natural: bool
    ) -> None:
        """m <- mu m + direction + w theta, theta <- theta - lr m."""
        lr, momentum = float(group["lr"]), group["momentum"]
        terms, keep = ((gradient, 1.0),), 1 - lr * decay
        if not momentum:
            add(p, -lr, terms, keep)
            return
        buffer: Tensor = state["momentum_buffer"]
        add(buffer, 1.0, terms, momentum)
        if decay:
            buffer.add_(p, alpha=decay)
        if not group["nesterov"]:
            p.add_(buffer, alpha=-lr)
            return
        add(p, -lr, terms, keep)
        p.add_(buffer, alpha=-lr * momentum)


class SGD(Rule):
    """torch.optim.SGD; a preconditioned layer keeps SGD's buffer and takes a step of SGD's length.

    The decay, which torch adds to the gradient, is left out of what is preconditioned and added again afterwards:
    `decay_share` is how many times the parameter its momentum buffer holds (but for how far the parameter has moved
    within the buffer's memory). A buffer of natural gradients does not hold it.
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
        if decay:
            gradient = gradient.add(p, alpha=decay)
        momentum = group["momentum"]
        if momentum:
            state["decay_share"] = momentum * state["decay_share"] + decay
            buffer: Tensor = state["momentum_buffer"].mul_(momentum).add_(gradient)
            gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        p.add_(within(gradient, largest), alpha=-float(group["lr"]))

    def plain_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> None:
        """Bit for bit torch's."""
        momentum = group["momentum"]
        if decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if momentum:
            buffers = [state["momentum_buffer"] for state in states]
            for state in states:
                state["decay_share"] = momentum * state["decay_share"] + decay
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            gradients = list(torch._foreach_add(gradients, buffers, alpha=momentum)) if group["nesterov"] else buffers
        torch._foreach_add_(parameters, gradients, alpha=-float(group["lr"]))

    def course(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, scratch: Scratch, natural: bool
    ) -> Course:
        """torch's direction without its decay, at its own length."""
        momentum = group["momentum"]
        if not momentum:
            return Course(gradient, mixture=Mixture(Blend(1.0, 0.0), None))
        ahead = 1 + momentum if group["nesterov"] else 1.0
        # The buffer's weight beside the gradient's: m, or with Nesterov m^2 beside 1 + m.
        beside = momentum**2 / ahead if group["nesterov"] else momentum
        vector = torch.add(gradient, state["momentum_buffer"], alpha=beside, out=scratch.like(p))
        if state["decay_share"] and not natural:
            vector.sub_(p, alpha=beside * state["decay_share"])
        mixture = None
        if natural or not (state["decay_share"] or group["weight_decay"]):
            mixture = Mixture(Blend(ahead, ahead * beside), Blend(1.0, momentum))
        return Course(vector if ahead == 1.0 else vector.mul_(ahead), spend=True, mixture=mixture)

    def courses(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group
    ) -> list[Course] | None:
        """torch's directions without their decay."""
        momentum, shares = group["momentum"], {state.get("decay_share") for state in states}
        if not momentum or len(shares) > 1:  # some joined later
            return None
        ahead = 1 + momentum if group["nesterov"] else 1.0
        beside = momentum**2 if group["nesterov"] else momentum
        buffers, (share,) = [state["momentum_buffer"] for state in states], shares
        vectors = torch._foreach_mul(buffers, beside)
        torch._foreach_add_(vectors, gradients, alpha=ahead)
        if share:
            torch._foreach_add_(vectors, parameters, alpha=-beside * share)
        mixture = None
        if not (share or group["weight_decay"]):
            mixture = Mixture(Blend(ahead, beside), Blend(1.0, momentum))
        return [Course(vector, spend=True, mixture=mixture) for vector in vectors]

    def follow_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> list[float]:
        """As `follow`."""
        lr, momentum = float(group["lr"]), group["momentum"]
        buffers, keeps = [state["momentum_buffer"] for state in states], []
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        if decay:
            torch._foreach_add_(buffers, parameters, alpha=decay)
        for state in states:
            share = state["decay_share"] = momentum * state["decay_share"] + decay
            keeps.append(1 - lr * (decay + momentum * share if group["nesterov"] else share))
        return keeps

    def follow(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add, natural: bool
    ) -> None:
        """theta <- theta - lr (direction + share of decay * theta)."""
        lr, momentum, share = float(group["lr"]), group["momentum"], decay
        terms: list[tuple[Tensor, float]] = [(gradient, 1.0)]
        if momentum:
            buffer = torch.add(gradient, state["momentum_buffer"], alpha=momentum, out=state["momentum_buffer"])
            if decay and not natural:
                buffer.add_(p, alpha=decay)
            held = share = state["decay_share"] = momentum * state["decay_share"] + decay
            terms = [(buffer, 1.0)]
            if group["nesterov"]:
                terms, held, share = [(gradient, 1.0), (buffer, momentum)], momentum * held, decay + momentum * held
            if held and not natural:  # what the buffer holds of the parameter was not preconditioned
                terms.append((p, -held))
        add(p, -lr, terms, 1 - lr * share)


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
        mean, second, step = state["exp_avg"], group["betas"][1], state["adam_step"]
        denominator = (state["exp_avg_sq"].sqrt() / (1 - second**step) ** 0.5).add_(group["eps"])
        correction = 1 - group["betas"][0] ** step
        if largest is None:
            p.addcdiv_(mean, denominator, value=-(lr / correction))
        else:
            p.add_(within((mean / correction).div_(denominator), largest), alpha=-lr)

    def plain_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> None:
        """Bit for bit torch's."""
        if len({state["adam_step"] for state in states}) > 1:  # some joined later
            super().plain_together(parameters, gradients, states, group, decay)
            return
        lr, (first, second), eps = float(group["lr"]), group["betas"], group["eps"]
        for state in states:
            state["adam_step"] += 1
        step = states[0]["adam_step"]
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        if decay:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - second**step) ** 0.5)
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(parameters, means, denominators, value=-(lr / (1 - first**step)))

    def _remember(self, gradient: Tensor, state: State, group: Group) -> None:
        first, second = group["betas"]
        state["adam_step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def course(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, scratch: Scratch, natural: bool
    ) -> Course:
        """The first moment, at the length of AdamW's direction."""
        (first, second), step = group["betas"], state["adam_step"] + 1
        room, square = scratch.like(p), scratch.like(p, slot=1)
        gradient = gradient.to(room.dtype)
        mean = torch.lerp(state["exp_avg"].to(room.dtype), gradient, 1 - first, out=room)
        torch.mul(state["exp_avg_sq"], second, out=square).addcmul_(gradient, gradient, value=1 - second)
        finite = moderate(square, False)  # an infinite square would be a step of zero, and stay
        denominator = square.sqrt_().div_((1 - second**step) ** 0.5).add_(group["eps"])
        length = square_of(torch.div(mean, denominator, out=square)) / (1 - first**step) ** 2
        blend = Blend(1 - first, first)
        return Course(mean, length, spend=True, finite=finite, mixture=Mixture(blend, blend))

    def courses(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group
    ) -> list[Course] | None:
        """First moments, at the lengths of AdamW's directions."""
        if len(steps := {state["adam_step"] + 1 for state in states}) > 1:  # some joined later
            return None
        (first, second), (step,) = group["betas"], steps
        means = torch._foreach_lerp([state["exp_avg"] for state in states], gradients, 1 - first)
        squares = torch._foreach_mul([state["exp_avg_sq"] for state in states], second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        # An infinite square would be a step of zero, and stay.
        finite = [moderate(square, False) for square in squares]
        torch._foreach_sqrt_(squares)
        torch._foreach_div_(squares, (1 - second**step) ** 0.5)
        torch._foreach_add_(squares, group["eps"])
        steps_of_adam = torch._foreach_div(means, squares)
        lengths = [length.item() for length in torch._foreach_norm(steps_of_adam)]
        blend, correction = Blend(1 - first, first), (1 - first**step) ** 2
        return [
            Course(
                mean,
                (length * length if SAFE[0] < length < SAFE[1] else square_of(vector)) / correction,
                spend=True,
                finite=fact,
                mixture=Mixture(blend, blend),
            )
            for mean, vector, length, fact in zip(means, steps_of_adam, lengths, finite, strict=True)
        ]

    def follow_together(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[State], group: Group, decay: float
    ) -> list[float]:
        """As `follow`."""
        (first, second), lr = group["betas"], float(group["lr"])
        for state in states:
            state["adam_step"] += 1
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_([state["exp_avg"] for state in states], gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        return [1 - lr * decay] * len(parameters)

    def follow(
        self, p: Tensor, gradient: Tensor, state: State, group: Group, decay: float, add: Add, natural: bool
    ) -> None:
        """theta <- (1 - lr w) theta - lr direction."""
        lr = float(group["lr"])
        self._remember(gradient, state, group)
        add(p, -lr, ((state["exp_avg"], 1.0),), 1 - lr * decay)


GRAFTS: dict[str | None, Rule] = {None: Own(), "sgd": SGD(), "adamw": AdamW()}


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

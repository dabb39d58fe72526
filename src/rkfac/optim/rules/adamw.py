"""torch.optim.AdamW, bit for bit without a preconditioner, and at its length with one."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.curvature.following import Blend, Mixture
from rkfac.linalg import SAFE
from rkfac.optim.clip import within
from rkfac.optim.gate import moderate
from rkfac.optim.rules.base import Add, Course, Group, Rule, State, square_of
from rkfac.optim.scratch import Scratch


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

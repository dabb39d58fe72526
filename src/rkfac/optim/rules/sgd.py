"""torch.optim.SGD, bit for bit without a preconditioner, and at its length with one."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.curvature.following import Blend, Mixture
from rkfac.optim.clip import within
from rkfac.optim.rules.base import Add, Course, Group, Rule, State
from rkfac.optim.scratch import Scratch


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

"""The preconditioner's own length: as in the paper, and as in SENG."""

from __future__ import annotations

import torch
from torch import Tensor

from rkfac.curvature.following import Blend, Mixture
from rkfac.linalg import Terms
from rkfac.optim.clip import within
from rkfac.optim.gate import moderate
from rkfac.optim.rules.base import Add, Course, Group, Rule, State, longest
from rkfac.optim.scratch import Scratch


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

"""A rule that remembers where the last steps came from: the pull of KLD-WRM's past regularisers.

A step s_k solves (B_k + F_k / lr_k) s_k = -g^_k with g^_k = g_k + h_k / lr_k, where h_k = sum_i c_k(i) F_i (theta_k - theta_i)
is how strongly the past, which every regulariser is centred at, pulls. It follows from one buffer a parameter:
h_k = rho (h_(k-1) + F_(k-1) s_(k-1)), kept as `past` * `past_lr`. The step is counted as it was taken, clips included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rkfac.linalg import Terms
from rkfac.optim.rules import Course, Curved, Group, Own, State
from rkfac.optim.scratch import Scratch

STILL = 1e-30  # of the last learning rate: below it a parameter counts as standing still


class Past(Own):
    """Own's steps along F^-1 g^ with g^ = g + rho (past_lr / lr) past; `past` becomes g^ - g - F v of each step lr v."""

    beside = frozenset({"past", "past_lr"})
    remembers = True

    def prepare(self, state: State, p: Tensor, group: Group) -> None:
        """Nothing is remembered at first."""
        super().prepare(state, p, group)
        if "past" not in state:
            state["past"], state["past_lr"] = torch.zeros_like(p, memory_format=torch.preserve_format), 0.0

    def _pull(self, state: State, group: Group) -> float | None:
        """rho past_lr / lr; None where lr is zero and nothing moves."""
        lr, last = float(group["lr"]), state["past_lr"]
        return float(group["factor_decay"]) * last / lr if lr > STILL * last else None

    def course(self, p: Tensor, gradient: Tensor, state: State, group: Group, scratch: Scratch, natural: Any) -> Course:
        """g^."""
        course, pull = super().course(p, gradient, state, group, scratch, natural), self._pull(state, group)
        if pull:
            vector = torch.add(gradient, state["past"], alpha=pull, out=scratch.like(p))
            return course._replace(vector=vector, mixture=None)
        return course._replace(mixture=None)

    def _terms(self, gradient: Tensor, state: State, group: Group) -> Terms:
        pull = self._pull(state, group)
        return ((gradient, 1.0), (state["past"], pull)) if pull else ((gradient, 1.0),)

    def remember(self, gradient: Tensor, state: State, group: Group, curved: Curved) -> None:
        """past <- (g^ - g) - F v."""
        past, pull = state["past"], self._pull(state, group)
        if pull is None:  # s = 0: h fades
            past.mul_(group["factor_decay"])
            return
        share = torch.as_tensor(curved.share, dtype=past.dtype, device=past.device)
        if curved.tensor is None:
            past.mul_(pull * (1 - share)).addcmul_(gradient.to(past.dtype), -share)
        else:
            past.mul_(pull).addcmul_(curved.tensor.to(past.dtype), -share)
        state["past_lr"] = float(group["lr"])

    def went_on(self, state: State, product: Tensor) -> None:
        """past <- past + F d / lr: a step of -lr v + d has g^ - g - F (v - d / lr)."""
        state["past"].add_(product)

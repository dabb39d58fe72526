"""Optimizers that fail in processes of their own, which import no more than this for them."""

from __future__ import annotations

import os

import torch


class Exploding(torch.optim.SGD):
    """Fails in its second step where the learning rate is large."""

    def step(self, closure=None):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 2 and self.param_groups[0]["lr"] > 0.05:
            raise RuntimeError("too large")
        return super().step(closure)


class Dying(torch.optim.SGD):
    """Takes its process with it."""

    def step(self, closure=None):
        os._exit(7)

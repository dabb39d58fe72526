"""Rows that a natural gradient is the sum of, kept until the step that comes to another preconditioner.

Carrying [W | b] from one basis to the next takes 8 (r_G + r_A) d_G d_A flops, making it anew from its n rows 2 n d_G d_A. What
is in `.grad` by then is not believed to be the rows' sum: it is looked at along random directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rkfac.linalg import AGREEMENT, Rowwise
from rkfac.linalg.shapes import Float

LOOKS = 2  # random directions; what is hidden from one of them is not from the other


class Passed:
    """The rows of all backward passes since the last step, as they arrived: g of the outputs and x of the inputs."""

    def __init__(self) -> None:
        self._passes: list[tuple[Tensor, Tensor]] = []

    def add(self, g: Float[Tensor, "n dg"], x: Float[Tensor, "n dw"]) -> None:
        """Rows of one backward pass."""
        self._passes.append((g, x))

    def drop(self) -> None:
        """The gradient is gone, or its step is over."""
        self._passes = []

    def cheaper(self, before: Rowwise, after: Rowwise) -> bool:
        """Whether there are any, and few enough that they cost half of a carry at most."""
        modes = sum(side.U.shape[-1] for both in (before, after) for side in (both.G, both.A))
        return 0 < sum(len(g) for g, _ in self._passes) <= modes

    def remade(self, W: Tensor, b: Tensor | None, before: Rowwise, after: Rowwise) -> bool:
        """Write [W | b], the rows' sum preconditioned by `before`, as it is under `after`; False: it is another matrix."""
        scale = self._scale(W, b, before)
        if scale is None:
            return False
        W.zero_()
        if b is not None:
            b.zero_()
        for g, x in self._passes:
            rows, inputs, ones = after.of(g, x, b is not None)
            W.addmm_(rows.mT, inputs, alpha=scale)
            if b is not None and ones is not None:
                b.addmv_(rows.mT, ones, alpha=scale)
        return True

    def _scale(self, W: Tensor, b: Tensor | None, before: Rowwise) -> float | None:
        """By what the sum was multiplied since, by a clip or an unscaling; None: that does not explain [W | b]."""
        width = W.shape[1]
        generator = torch.Generator().manual_seed(width)
        across = torch.randn(width + 1, LOOKS, generator=generator, dtype=torch.float64).to(W)
        seen = W @ across[:width] if b is None else (W @ across[:width]).addr_(b, across[width])
        expected = torch.zeros_like(seen, dtype=torch.float64)
        for g, x in self._passes:
            rows, inputs, ones = before.of(g, x, b is not None)
            along = inputs @ across[:width]
            expected += rows.mT @ (along if ones is None else along + ones[:, None] * across[width])
        square = torch.linalg.vector_norm(W).double().square()
        square += 0.0 if b is None else torch.linalg.vector_norm(b).double().square()
        known = float(expected.square().sum())
        if not (math.isfinite(square) and math.isfinite(known) and known > 0):
            return None
        rounding = AGREEMENT * torch.finfo(W.dtype).eps * float(square) ** 0.5
        for scale in (1.0, float((seen.double() * expected).sum()) / known):
            if float(torch.linalg.vector_norm(seen.double() - scale * expected)) <= rounding:
                return scale
        return None

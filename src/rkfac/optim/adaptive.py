"""Levenberg-Marquardt damping: trust the quadratic model more when it predicts well, less when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rkfac.curvature.block import Block, Group
from rkfac.curvature.hooks import full_precision
from rkfac.optim.arguments import POSITIVE


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Every `every` steps compare the loss's real change with the model's, and move the damping by `factor`^`every`.

    Needs `optimizer.step(closure)`: on those steps the closure runs once more after the update (one extra forward and
    backward). Martens and Grosse: lower the damping when the ratio exceeds 3/4, raise it below 1/4.
    """

    every: int = 5
    factor: float = 0.95
    smallest: float = 1e-6
    largest: float = 1e3

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be an integer >= 1, got {self.every!r}")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must lie strictly between 0 and 1, got {self.factor}")
        POSITIVE("smallest", self.smallest)
        POSITIVE("largest", self.largest)

    def adapted(self, damping: float, actual: float, predicted: float) -> float:
        """The next damping, from the actual and the predicted change of the loss (both negative when all is well)."""
        ratio = actual / predicted if predicted < 0 else -1.0
        if not ratio >= 0.25:  # NaN counts as a bad prediction
            damping = damping / self.factor**self.every
        elif ratio > 0.75:
            damping = damping * self.factor**self.every
        return min(max(damping, self.smallest), self.largest)


class Watch:
    """Parameters and gradients as they were before a step, to ask the quadratic model what the step should have done."""

    def __init__(self, blocks: Sequence[tuple[Block, Group]]) -> None:
        self._layers = [
            (block, group, [p.detach().clone() for p in block.parameters], [_gradient(p) for p in block.parameters])
            for block, group in blocks
            if block.weight.grad is not None
        ]

    def predicted(self, sign: float) -> float:
        """<g, d> + d^T (F + damping) d / 2 over all watched layers, d being what the step changed."""
        total = 0.0
        for block, group, start, gradients in self._layers:
            change = tuple(p.detach() - old for p, old in zip(block.parameters, start, strict=True))
            linear = sum(float((d * g).sum()) for d, g in zip(change, gradients, strict=True))
            with full_precision([block.weight.device]):
                curved = block.multiply(change, group)
            total += sign * linear + 0.5 * sum(float((d * c).sum()) for d, c in zip(change, curved, strict=True))
        return total


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()

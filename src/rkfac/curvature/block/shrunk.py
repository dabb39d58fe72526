"""Layers that SENG's published code has no curvature for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.settings import Group
from rkfac.curvature.factor import Refreshed
from rkfac.curvature.following import Origin
from rkfac.curvature.statistics import Statistics
from rkfac.layers.base import Use, statistics_dtype
from rkfac.linalg import Whole, number, unit_of


class ShrunkBlock(Block):
    """S = J / (1 + l): what the published code does to layers it has no curvature for."""

    kind = "shrunk"
    period = "inverse_every"

    def _make(self) -> None:
        """There is nothing to know."""

    @property
    def updates(self) -> int:
        """As if a statistic had come: none is waited for."""
        return 1

    def statistics(self) -> Statistics:
        """None."""
        return Statistics(())

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Nothing is collected; a shift that was frozen or unfrozen counts from now on."""
        self.bias = self._has_bias()

    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Nothing."""
        return 0

    @property
    def addable(self) -> bool:
        """No: it stands beside blocks that keep samples."""
        return False

    def asks(self, due: bool) -> bool:
        """Never."""
        return False

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """Nothing."""

    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """The gradients themselves, at another length."""
        unit, dtype = unit_of(gradients), statistics_dtype(self.weight)
        parts = [g.to(dtype) / unit.to(dtype) for g in gradients]
        true = number(unit)
        length = number(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p).double() for p in parts])))
        scale = true / (1 + group["damping"])
        size = sum(part.numel() for part in parts)
        return Direction(
            tuple(map(Whole, parts)), scale, size, lambda: length * true, length, lambda: length * length * true
        )

    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """(1 + l) times a change."""
        return tuple(c * (1 + group["damping"]) for c in change)

    def facts(self, group: Group) -> dict[str, Any]:
        """Units stand on the output side."""
        return {
            "input_dim": 1 + self.bias,
            "output_dim": self.weight.numel(),
            "damping_output": float(group["damping"]),
        }

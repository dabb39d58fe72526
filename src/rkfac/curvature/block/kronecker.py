"""Linear, convolution and embedding layers: two running factors, a damping rule, the two-sided solve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.block.base import Block, Group, Settings
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.factor import DenseFactor, DiagonalFactor, Factor
from rkfac.curvature.moment import DiagonalMoment, Moment
from rkfac.layers.base import KroneckerAdapter, statistics_dtype
from rkfac.linalg import Preconditioner, peak, preconditioner


class KroneckerBlock(Block):
    """S = (G + l I)^-1 J (A + l I)^-1 or one of its kin, with the bias as last column of J."""

    kind = "Kronecker"

    def __init__(self, name: str, module: nn.Module, adapter: KroneckerAdapter, settings: Settings) -> None:
        self.adapter = adapter
        super().__init__(name, module, adapter, settings)

    def reset(self) -> None:
        """Forget everything: at the start, and when the set of trained parameters changes."""
        super().reset()
        like = torch.empty(0, dtype=statistics_dtype(self.weight), device=self.weight.device)
        start, shape = self.settings.start, self.adapter.input_shape(self.module, self.bias)
        self.input: Factor[Any] = (DiagonalFactor if self.adapter.diagonal_input() else DenseFactor)(shape, start, like)
        self.output = DenseFactor(self.adapter.output_shape(self.module), start, like)
        self._prepared: tuple[tuple[int, float, torch.device], Preconditioner] | None = None

    @property
    def factors(self) -> Mapping[str, Factor[Any]]:
        """A and G."""
        return {"input": self.input, "output": self.output}

    @property
    def width(self) -> int:
        """Outputs of all groups."""
        return math.prod(self.adapter.output_shape(self.module))

    def moments(self) -> tuple[Moment, ...]:
        """Of inputs and of output gradients."""
        return (DiagonalMoment if self.adapter.diagonal_input() else Moment)(), Moment()

    def collect(self, x: Tensor, g: Tensor) -> int:
        """Rows of this call join what is pending, the same ones on both sides."""
        of_inputs, of_gradients = self.pending.moments
        sharing = self.settings.weight_sharing
        rows = self.adapter.count(self.module, g, sharing)
        drawn, weight = self.draw(rows, g.device)
        of_gradients.add(self.adapter.output_rows(self.module, x, g, sharing, drawn), weight, source=g)
        finished = self.adapter.input_moment(self.module, x, self.bias, sharing) if drawn is None else None
        if finished is not None:
            largest = peak(x).to(statistics_dtype(x))
            of_inputs.add_finished(finished, largest.clamp_min(1.0) if self.bias else largest)  # a bias's input is one
            return rows
        if self.adapter.diagonal_input():
            drawn, weight = None, 1.0  # counting all is cheaper than drawing
        for part in self.adapter.input_rows(self.module, x, self.bias, sharing, drawn):
            of_inputs.add(part, weight, source=x)
        return rows

    def decompose(self, group: Group) -> None:
        """Both factors; nothing changes if either fails."""
        rule, damping = self.settings.damping, group["damping"]
        made = []
        for side, own, other in (("input", self.input, self.output), ("output", self.output, self.input)):
            in_force = rule.in_force(damping, own, other)
            made.append(own.refresh(self.settings.request(group, self.name, side, self.version, in_force)))
        for factor, refreshed in zip((self.input, self.output), made, strict=True):
            factor.adopt(refreshed)

    def _inverse(self, group: Group) -> Preconditioner:
        """The damped inverse, made once for a basis and a damping."""
        key = (self.version, float(group["damping"]), self.weight.device)
        if self._prepared is None or self._prepared[0] != key:
            multipliers = self.settings.damping.multipliers(key[1], self.input, self.output)
            self._prepared = (key, preconditioner(self.input.low, self.output.low, multipliers))
        return self._prepared[1]

    def direction(self, gradients: tuple[Tensor, ...], group: Group) -> Direction:
        """The two-sided solve."""
        with self.timed("apply"):
            self._follow()
            J = self.adapter.matrix(self.module, gradients[0])
            j = self.adapter.vector(self.module, gradients[1]) if self.bias else None
            solution = self._inverse(group).solve(J, j)
            parts = [self.adapter.tensor(self.module, solution.matrix)]
            if solution.vector is not None:
                parts.append(solution.vector.reshape(gradients[1].shape))
            return Direction(tuple(parts), solution.scale, gradients)

    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """(G + l) D (A + l) for the factored rules, G D A + l D for the product rule."""
        self._follow()
        dtype = statistics_dtype(self.weight)
        D = self.adapter.matrix(self.module, change[0]).to(dtype)
        if self.bias:
            D = torch.cat([D, self.adapter.vector(self.module, change[1]).to(dtype)[..., None]], dim=-1)
        F = self.settings.damping.multiply(D, group["damping"], self.input, self.output)
        if not self.bias:
            return (self.adapter.tensor(self.module, F),)
        return self.adapter.tensor(self.module, F[..., :-1]), F[..., -1].reshape(change[1].shape)

    def facts(self, group: Group) -> dict[str, Any]:
        """Sizes, ranks, captured trace, dampings."""
        facts: dict[str, Any] = {}
        for side, factor in self.factors.items():
            captured = factor.captured if factor.rank is not None else None
            facts[f"{side}_dim"] = factor.shape[-1]
            facts[f"rank_{side}"] = factor.rank
            facts[f"captured_{side}"] = None if captured is None else float(captured)
        if self.ready:
            shares = self.settings.damping.shares(group["damping"], self.input, self.output)
            facts["damping_input"], facts["damping_output"] = (float(share.mean()) for share in shares)
        return facts

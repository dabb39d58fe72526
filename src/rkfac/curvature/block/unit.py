"""Scale-and-shift layers: a 1 x 1 or 2 x 2 Fisher block a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.decompose import Exact
from rkfac.curvature.factor import DenseFactor, Factor, Refreshed
from rkfac.curvature.following import Origin
from rkfac.layers.base import UnitAdapter, Use, statistics_dtype
from rkfac.linalg import Whole, number, size_of


class UnitBlock(Block):
    """(F_u + l I)^-1 [dscale_u, dshift_u] for every unit u; a relative l is measured over all units."""

    kind = "unit-wise"
    positions_summed = True
    factor_type: ClassVar[type[DenseFactor]] = DenseFactor

    def __init__(self, uses: Sequence[Use], adapter: UnitAdapter, settings: Settings) -> None:
        self.adapter = adapter
        super().__init__(uses, adapter, settings)

    def _make(self) -> None:
        """One factor of small blocks."""
        like = torch.empty(0, dtype=statistics_dtype(self.weight), device=self.weight.device)
        self.factor = self.factor_type((self.weight.numel(), 1 + self.bias), self.settings.start, like)
        self._prepared: tuple[tuple[int, float, torch.device], Tensor] | None = None

    @property
    def factors(self) -> Mapping[str, Factor[Any]]:
        """Small blocks, all of one factor."""
        return {"unit": self.factor}

    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Gradients of scale and shift, a row a sample."""
        sharing = self.settings.weight_sharing
        rows = self.adapter.count(self.module, g, sharing)
        drawn, weight = self.draw(rows, g.device, self.adapter.positions(self.module, g) // rows)
        u = self.adapter.unit_gradients(self.module, x, g, sharing, drawn)  # (n, units, k)
        self.pending.moments[0].add(u.transpose(0, 1), weight, source=g)
        return rows

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """Blocks this small are always decomposed exactly."""
        in_force = self.settings.damping.alone(group["damping"], self.factor)
        request = self.settings.request(group, self.name, "unit", self.version, in_force, None)
        self.factor.adopt(self.factor.refresh(replace(request, strategy=Exact())))

    def _inverse(self, group: Group) -> Tensor:
        """The damped inverse blocks (k, k, units), made once for a basis and a damping."""
        key = (self.version, float(group["damping"]), self.weight.device)
        if self._prepared is None or self._prepared[0] != key:
            low, damping = self.factor.low, self.settings.damping.unit(key[1], self.factor)
            U, powers = low.U.double(), (low.s + damping) ** self.settings.damping.power
            self._prepared = (key, ((U * powers[..., None, :]) @ U.mT).permute(1, 2, 0).contiguous())
        return self._prepared[1]

    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """Small solves, all units at once and in float64."""
        with self.timed("apply"):
            self._follow()
            stacked = torch.stack([g.flatten() for g in gradients]).double()  # (k, units)
            solved = (self._inverse(group) * stacked).sum(1)
            length = number(torch.linalg.vector_norm(solved))
            scale = size_of(length)
            solved = solved / scale
            dtype = statistics_dtype(self.weight)
            parts = tuple(Whole(share.reshape(g.shape)) for share, g in zip(solved.to(dtype), gradients, strict=True))
            return Direction(
                parts,
                scale,
                solved.numel(),
                given=lambda: number(torch.linalg.vector_norm(stacked)),
                length=length / scale,
                along=lambda: number((solved * stacked).sum()),
            )

    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """(F_u + l I) times a change of every unit."""
        self._follow()
        low, damping = self.factor.low, self.settings.damping.unit(group["damping"], self.factor)
        U = low.U.double()
        stacked = torch.stack([c.flatten().double() for c in change], dim=-1)[..., None]
        product = (U @ ((U.mT @ stacked) * (low.s + damping)[..., None])).squeeze(-1)
        return tuple(product[:, i].to(c.dtype).reshape(c.shape) for i, c in enumerate(change))

    def facts(self, group: Group) -> dict[str, Any]:
        """Units stand on the output side."""
        facts: dict[str, Any] = {"input_dim": 1 + self.bias, "output_dim": self.weight.numel()}
        if self.ready:
            facts["damping_output"] = float(self.settings.damping.unit(group["damping"], self.factor))
        return facts

"""Blocks of KLD-WRM: the inverse of (F + lr B) / (1 + lr), and what the curvature F makes of a step along it.

B is the curvature of the present batch alone. On a step that has both new statistics and a new decomposition the factors are
A~ = (A + lr A_k) / (1 + lr), that is the running average with the batch's own moment blended in once more, and F + lr B is
taken for (1 + lr) A~ (x) G~: right to first order in how far the batch is from the average, and exact where only one side is
kept. On all other steps B = F, and both are the same basis. A model with inner steps also asks for B alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.block.settings import Group
from rkfac.curvature.block.tied import TiedBlock
from rkfac.curvature.block.unit import UnitBlock
from rkfac.curvature.factor import Refreshed
from rkfac.curvature.following import Origin
from rkfac.curvature.moment import Moment
from rkfac.layers.base import statistics_dtype


class Proximal(Block):
    """A block whose steps minimise a model of the loss plus lr^-1 times the regularisers of all past steps."""

    plain: ClassVar[type[Block]]  # the block that this one blends

    _batch: Sequence[Moment] = ()  # this step's own statistics
    _blended: Block | None = None  # what this step is solved with, where that is not the running averages
    _alone: Block | None = (
        None  # the batch's own curvature, where a model asks for it and it is not the running averages
    )

    @property
    def addable(self) -> bool:
        """Unless a model looks at the batch itself, of which every process has another one."""
        return not self.settings.method.asks_for_the_batch

    @property
    def ownable(self) -> tuple[str, ...]:
        """None where the present batch is blended into the averages: everybody needs them then."""
        return () if self.settings.method.quadratic else self.plain.ownable.fget(self)  # type: ignore[attr-defined]

    def begin(self) -> None:
        """The last step's statistics are not this one's."""
        self._batch, self._blended, self._alone = (), None, None

    def commit(self, group: Group, numbers: list[float], loss_scale: float) -> bool:
        """Also keep the batch's own moments until the basis is made."""
        moments, finite = self.pending.moments, super().commit(group, numbers, loss_scale)
        self._batch = moments if finite and self.settings.method.quadratic else ()
        return finite

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """The running averages, and those with the present batch blended in where there is one."""
        rate, blended, alone = float(group["lr"]), None, None
        if self._batch and rate:
            blended = self._blend(group, 1 / (1 + rate))
            alone = self._blend(group, 0.0) if self.settings.method.asks_for_the_batch else None
        self.plain.decompose(self, group, made)
        self._blended, self._alone = blended, alone

    def _blend(self, group: Group, keep: float) -> Block:
        """This much of the running averages, and the batch's own moments for the rest."""
        blended = self.plain(self.uses, self._adapter, self.settings)
        blended.version, blended.rows = self.version, self.rows
        for side, factor in blended.factors.items():
            factor.start_from(self.factors[side])
        for factor, moment in zip(blended.factors.values(), self._batch, strict=True):
            factor.take(moment, keep)
        blended.decompose(group)
        return blended

    def _shrink(self, group: Group) -> float:
        """1 / (1 + lr): what a quadratic model with B = F makes of a step."""
        return 1 / (1 + float(group["lr"])) if self.settings.method.quadratic else 1.0

    @property
    def shows_rows(self) -> bool:
        """What is preconditioned is more than what passes by as rows."""
        return False

    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """(F + lr B)^-1 of the gradients."""
        self._batch = ()  # they are kept no longer than needed
        if self._blended is None:
            direction = self.plain.direction(self, gradients, group, spend)
        else:
            direction = self._blended.direction(gradients, group, spend)
        return replace(direction, scale=direction.scale * self._shrink(group))

    def curved(
        self, direction: Direction, vectors: Sequence[Tensor], group: Group
    ) -> tuple[float, tuple[Tensor, ...] | None]:
        """F times a direction that was just made from these vectors: a share of them, or a share and tensors."""
        if self._blended is None:
            return self._shrink(group), None
        formed = []
        for index, vector in enumerate(vectors):
            whole = torch.zeros_like(vector, dtype=statistics_dtype(vector))
            direction.add_to(index, whole, 1.0, ((vector, 1.0),))
            formed.append(whole)
        return 1.0, self.multiply(tuple(formed), group)

    def of_batch(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """B times a change of the parameters."""
        return (self._alone or self).multiply(change, group)


class ProximalKroneckerBlock(Proximal, KroneckerBlock):
    """Of layers with two factors."""

    plain = KroneckerBlock

    def _follow_rows(self, projects: bool) -> None:
        """Nobody shows rows."""


class ProximalTiedBlock(Proximal, TiedBlock):
    """Of a table that is also a head."""

    plain = TiedBlock


class ProximalUnitBlock(Proximal, UnitBlock):
    """Of scale-and-shift layers: (F + lr B) itself, for a unit's block has one factor alone."""

    plain = UnitBlock

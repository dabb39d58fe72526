"""Factors that are updated by rows and never formed: those that are wide enough for it (B-KFAC), or all (SKFAC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.factor import ColumnsFactor, Factor, OnlineFactor
from rkfac.curvature.moment import RowsMoment
from rkfac.layers.base import KroneckerAdapter, Use

MODES = 256  # kept by an online factor where neither a rank nor the decomposition bounds them


class OnlineBlock(KroneckerBlock):
    """A factor of width d is kept online where r modes and the n rows of a statistic are fewer than d, and dense elsewhere.

    That is known from `rows=` alone, or when the first statistic comes; it is decided once, and saved. Groups of a
    convolution stay dense. `Settings.method` is a `Brand`.
    """

    def __init__(self, uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> None:
        self._decided: dict[str, bool] = {}  # by side, whether it is online
        super().__init__(uses, adapter, settings)

    def _factor(self, side: str, shape: tuple[int, ...], like: Tensor) -> Factor[Any]:
        """Online until its first statistic says that it is not."""
        made = super()._factor(side, shape, like)
        if not made.square or len(shape) > 1 or self._decided.get(side) is False:
            return made
        factor = OnlineFactor(shape, self.settings.start, like, self.settings.method)
        bounded = self.settings.rows is not None and self.settings.rows < shape[-1]
        factor.most_rows = None if side in self._decided or bounded else shape[-1]
        return factor

    @property
    def addable(self) -> bool:
        """No: rows are kept, not their sum."""
        return False

    def _modes(self, group: Group) -> int:
        """Kept by a factor that is online: what is used of them is decided by the rank and the damping at a refresh."""
        return self.settings.decomposition.most(group["rank"]) or MODES

    def _surely_online(self, d: int, group: Group) -> bool:
        return self.settings.rows is not None and self.settings.rows + self._modes(group) < d

    def _online(self) -> dict[str, OnlineFactor]:
        return {side: factor for side, factor in self.factors.items() if isinstance(factor, OnlineFactor)}

    def widest(self, group: Group) -> int:
        """Without those that will be online whatever comes."""
        online = self._online()
        return max(
            (
                factor.shape[-1]
                for side, factor in self.factors.items()
                if factor.square or (side in online and not self._surely_online(factor.shape[-1], group))
            ),
            default=0,
        )

    def blend(self, group: Group) -> None:
        """Decide what is not decided yet, and prepare Brand's updates."""
        modes = self._modes(group)
        for side, moment in zip(self.factors, self.pending.moments, strict=True):
            if side in self._online():
                assert isinstance(moment, RowsMoment)
                self._decide(side, moment.rows, group)
        for side, online in self._online().items():
            draw = partial(self.settings.randomness.generator, "correct", self.name, side, online.updates)
            online.prepare(modes, draw, f"the {side} factor of {self.name!r}")
        super().blend(group)

    def _decide(self, side: str, rows: int | None, group: Group) -> None:
        """Once, by the rows of the first statistic; None: so many that they were summed up."""
        if side in self._decided:
            return
        factor = self._online()[side]
        d = factor.shape[-1]
        fits = rows is not None and rows + self._modes(group) < d
        online = fits or (rows is not None and self._surely_online(d, group))
        self._decided = {**self._decided, side: online}
        factor.most_rows = None
        if not online:
            setattr(self, side, self._factor(side, factor.shape, self._like))

    def state_dict(self) -> dict[str, Any]:
        """Also what was decided."""
        return {**super().state_dict(), "online": dict(self._decided)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        decided = state["online"]
        if not isinstance(decided, Mapping) or not set(decided) <= {"input", "output"}:
            raise ValueError(f"the saved state has the factors {decided!r} online")
        if any(not isinstance(online, bool) for online in decided.values()):
            raise ValueError(f"the saved state has the factors {dict(decided)!r} online")
        self._decided = dict(decided)
        super().load_state_dict(state)


class ColumnsBlock(KroneckerBlock):
    """Every factor is kept as the rows of a batch, averaged slot by slot."""

    @property
    def addable(self) -> bool:
        """No: rows are kept, not their sum."""
        return False

    def _factor(self, side: str, shape: tuple[int, ...], like: Tensor) -> Factor[Any]:
        made = super()._factor(side, shape, like)
        return ColumnsFactor(shape, self.settings.start, like) if made.square else made

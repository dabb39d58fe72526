"""The side that a layer keeps no factor of: the identity, which no row changes and no damping is added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import Factor, Refreshed, restored
from rkfac.curvature.moment import Moment
from rkfac.linalg import LowRank


class IdentityFactor(Factor[LowRank]):
    """`shape` is (d,) or (groups, d)."""

    learns = False

    def _zero(self) -> Tensor:
        return self._like.new_zeros(0)

    def take(self, moment: Moment, decay: float) -> None:
        """Counts the statistic."""
        self._value = self._present
        self.updates += 1

    def refresh(self, request: Request) -> Refreshed[LowRank]:
        """One mode and a tail, all of them one: what every solve understands."""
        return self._made()

    def _made(self) -> Refreshed[LowRank]:
        groups, like = self.shape[:-1], self._like
        U = like.new_zeros(*self.shape, 1)
        U[..., 0, 0] = 1
        ones = torch.ones(groups, dtype=torch.float64, device=like.device)
        return Refreshed(LowRank(U, ones[..., None], ones), ones, ones.new_ones(()))

    @property
    def refresh_cost(self) -> int:
        """There is nothing to decompose."""
        return 0

    def dense(self) -> Tensor:
        """I."""
        d = self.shape[-1]
        return torch.eye(d, dtype=torch.float64, device=self._like.device).expand(*self.shape, d)

    def spectrum(self) -> Tensor:
        """Ones."""
        return torch.ones(self.shape, dtype=torch.float64, device=self._like.device)

    def trace(self) -> Tensor:
        """d, a number a group."""
        return self.spectrum().sum(-1)

    @property
    def rank(self) -> int | None:
        """Nothing is kept and nothing left out."""
        return None

    @property
    def basis_nbytes(self) -> int:
        """Memory of one mode."""
        return 0 if self._refreshed is None else self._refreshed.low.U.nbytes

    def _loaded(self, saved: Any) -> Tensor:
        return restored(saved, (0,), self._like, self._like.dtype)

    def _packed(self, refreshed: Refreshed[LowRank]) -> dict[str, Tensor | None]:
        return {}

    def _unpacked(self, tensors: Mapping[str, Any]) -> Refreshed[LowRank]:
        return self._made()

"""A factor kept as the rows of a batch, averaged over time slot by slot: SKFAC."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import LOWEST_LEVEL, Refreshed, restored
from rkfac.curvature.factor.dense import TYPICAL_RANK
from rkfac.curvature.factor.lowrank import LowRankFactor
from rkfac.curvature.moment import Moment, RowsMoment
from rkfac.linalg import LowRank, of_columns


class ColumnsFactor(LowRankFactor):
    """X = C C^T + identity * I with C <- decay C + (1 - decay) C_k, the columns of C_k being the scaled rows of a batch.

    `shape` is (d,) or (groups, d); the value is C^T in units of 2^exponent, (..., n, d). What one slot of a batch holds has
    nothing to do with what it held before, so that this is not the average of C_k C_k^T and smaller than it. A batch of
    fewer rows leaves the other slots to decay; one of more opens new slots, which held nothing before.
    """

    kind = "columns"
    square = False

    def moment(self) -> RowsMoment:
        """Rows."""
        return RowsMoment()

    def _zero(self) -> Tensor:
        return self._like.new_zeros(*self.shape[:-1], 0, self.shape[-1])

    def take(self, moment: Moment, decay: float) -> None:
        """One more batch."""
        assert isinstance(moment, RowsMoment), "columns are made of rows"
        keep, share = self._weights(decay)
        past, before = self._present, self._exponent
        rows, unit = (past[..., :0, :], 0.0) if moment.dead else moment.weighted()
        level = max(_log2(keep) + self._level, _log2(share * unit**0.5))
        self._level = level if level >= LOWEST_LEVEL / 2 else -math.inf  # below it is zero for every purpose
        alive = float(not math.isinf(self._level))
        past = past * (alive * keep * 2.0 ** (before - self._exponent))
        rows = rows.to(past) * (alive * share * unit**0.5 * 2.0**-self._exponent)
        if keep == 0:  # nothing is left of the past, not even its slots
            self._value = rows
            return
        longer, shorter = (past, rows) if past.shape[-2] >= rows.shape[-2] else (rows, past)
        longer[..., : shorter.shape[-2], :] += shorter
        self._value = longer

    def refresh(self, request: Request) -> Refreshed[LowRank]:
        """All eigenpairs there are, in O(d n^2 + n^3) and never d x d for n < d: algebraically Woodbury's inverse."""
        C = self._present.mT
        if C.shape[-1] == 0:  # no row yet that is not zero
            C = self._like.new_zeros(*self.shape, 1)
        low = of_columns(C, request.tail, request.name)
        return self._asked(low.shifted(0.0, 4.0**self._exponent), request)

    @property
    def refresh_cost(self) -> int:
        """Linear in the width."""
        return math.prod(self.shape) * TYPICAL_RANK**2

    def dense(self) -> Tensor:
        """C C^T + identity * I."""
        C = self._present.double() * 2.0**self._exponent
        X = C.mT @ C
        X.diagonal(dim1=-2, dim2=-1).add_(self._identity)
        return X

    def spectrum(self) -> Tensor:
        """Exact, so O(d^3)."""
        return torch.linalg.eigvalsh(self.dense()).flip(-1).clamp_min(0)

    def trace(self) -> Tensor:
        """A number a group."""
        square = torch.linalg.vector_norm(self._present, dim=(-2, -1), dtype=torch.float64).square()
        return square * 4.0**self._exponent + self._identity * self.shape[-1]

    def _loaded(self, saved: Any) -> Tensor:
        slots = saved.shape[-2] if isinstance(saved, Tensor) and saved.ndim > 1 else 0
        return restored(saved, (*self.shape[:-1], slots, self.shape[-1]), self._like, self._like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Also how many slots there are, by which columns are told from a matrix."""
        return {**super().state_dict(), "slots": self._present.shape[-2]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; refuses what does not fit or is not finite."""
        if state["slots"] != (0 if state["value"] is None else state["value"].shape[-2]):
            raise ValueError(f"the saved factor has {state['slots']!r} slots")
        super().load_state_dict(state)


def _log2(x: float) -> float:
    return math.log2(x) if x > 0 else -math.inf

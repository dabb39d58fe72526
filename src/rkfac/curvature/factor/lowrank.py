"""What factors have in common whose decomposition is a `LowRank`, whatever they keep the average as."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import Factor, Refreshed, restored
from rkfac.linalg import Intact, LowRank


class LowRankFactor(Factor[LowRank]):
    """`shape` is (d,) or (groups, d)."""

    @property
    def _basis(self) -> Tensor | None:
        """Eigenvectors in use, if any were asked for."""
        low = None if self._refreshed is None else self._refreshed.low
        return None if low is None or isinstance(low, Intact) else low.U

    def _made(self, low: LowRank) -> Refreshed[LowRank]:
        """A decomposition in true units, with what is known of the average beside it."""
        trace = self.trace()
        captured = (low.s.sum() / trace.sum().clamp_min(torch.finfo(trace.dtype).tiny)).clamp(0, 1)
        return Refreshed(low, trace / self.shape[-1], captured)

    def _asked(self, low: LowRank, request: Request) -> Refreshed[LowRank]:
        """Known eigenpairs of the average without its identity, cut to what is asked for, and the identity put back."""
        identity = self._identity
        low = request.strategy.trimmed(low, replace(request, offset=0.0 if self.start.sketched else identity))
        if self.start.sketched and low.tail is None:  # what a sketch that saw the identity would have discarded of it
            return self._made(LowRank(low.U, low.s + identity))
        return self._made(low.shifted(identity))

    @property
    def rank(self) -> int | None:
        """Eigenpairs kept."""
        return None if self._refreshed is None else self._refreshed.low.rank

    @property
    def basis_nbytes(self) -> int:
        """Memory of the kept eigenvectors, or of the matrix in their place."""
        low = None if self._refreshed is None else self._refreshed.low
        return 0 if low is None else low.matrix.nbytes if isinstance(low, Intact) else low.U.nbytes

    def _packed(self, refreshed: Refreshed[LowRank]) -> dict[str, Any]:
        low, known = refreshed.low, {"mean": refreshed.mean, "captured": refreshed.captured}
        if isinstance(low, Intact):
            return {"matrix": low.matrix, "scale": low.scale, "shift": low.shift, "name": low.name, **known}
        return {"U": low.U, "s": low.s, "tail": low.tail, **known}

    def _unpacked(self, tensors: Mapping[str, Any]) -> Refreshed[LowRank]:
        low = self._unpacked_intact(tensors) if "matrix" in tensors else self._unpacked_basis(tensors)
        mean, captured = (
            restored(tensors[key], shape, self._like, torch.float64)
            for key, shape in (("mean", self.shape[:-1]), ("captured", ()))
        )
        return Refreshed(low, mean, captured)

    def _unpacked_intact(self, tensors: Mapping[str, Any]) -> Intact:
        d, like = self.shape[-1], self._like
        matrix = restored(tensors["matrix"], (d, d), like, like.dtype)
        scale, shift = (float(tensors[key]) for key in ("scale", "shift"))
        if not bool(torch.equal(matrix, matrix.mT)) or not 0 < scale < math.inf or not 0 <= shift < math.inf:
            raise ValueError("a saved factor is not a symmetric matrix in units of a positive number")
        return Intact(matrix, scale, shift, str(tensors["name"]))

    def _unpacked_basis(self, tensors: Mapping[str, Any]) -> LowRank:
        groups, d, like = self.shape[:-1], self.shape[-1], self._like
        rank = tensors["U"].shape[-1]
        if not 1 <= rank <= d:
            raise ValueError(f"a saved basis keeps {rank} of {d} directions")
        wide = torch.float64
        tail = None if tensors["tail"] is None else restored(tensors["tail"], groups, like, wide)
        precision = wide if tensors["U"].dtype == wide else like.dtype
        U = restored(tensors["U"], (*groups, d, rank), like, precision)
        return LowRank(U, restored(tensors["s"], (*groups, rank), like, wide), tail)

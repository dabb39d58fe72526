"""The input factor of one-hot inputs: a diagonal of how often each was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import Factor, Refreshed, restored
from rkfac.curvature.moment import DiagonalMoment
from rkfac.linalg import DecompositionError, Diagonal


class DiagonalFactor(Factor[Diagonal]):
    """`shape` is (d,); its eigenvalues are its entries, so that a refresh copies them."""

    def moment(self) -> DiagonalMoment:
        """Counts."""
        return DiagonalMoment()

    def _zero(self) -> Tensor:
        return self._like.new_zeros(self.shape)

    def _average(self) -> Tensor:
        return self._present.double() * 2.0**self._exponent + self._identity

    def refresh(self, request: Request) -> Refreshed[Diagonal]:
        """The present diagonal."""
        diagonal = self._average()
        if not bool(torch.isfinite(diagonal).all()):
            raise DecompositionError(f"{request.name} holds NaN or Inf")
        return Refreshed(Diagonal(diagonal), diagonal.mean(), diagonal.new_ones(()))

    @property
    def refresh_cost(self) -> int:
        """There is nothing to decompose."""
        return math.prod(self.shape)

    def dense(self) -> Tensor:
        """As a matrix."""
        return torch.diag(self._average())

    def spectrum(self) -> Tensor:
        """Sorted."""
        return self._average().sort(descending=True)[0]

    def trace(self) -> Tensor:
        """Sum of the entries."""
        return self._average().sum()

    @property
    def rank(self) -> int | None:
        """Nothing is left out, so that rank has no meaning."""
        return None

    @property
    def basis_nbytes(self) -> int:
        """Memory of the copy in use."""
        return 0 if self._refreshed is None else self._refreshed.low.s.nbytes

    def _packed(self, refreshed: Refreshed[Diagonal]) -> dict[str, Tensor | None]:
        return {"s": refreshed.low.s}

    def _unpacked(self, tensors: Mapping[str, Any]) -> Refreshed[Diagonal]:
        diagonal = restored(tensors["s"], self.shape, self._like, torch.float64)
        return Refreshed(Diagonal(diagonal), diagonal.mean(), diagonal.new_ones(()))

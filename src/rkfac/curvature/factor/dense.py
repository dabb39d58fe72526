"""A factor kept as the upper half of a matrix, or as a batch of them (groups of a convolution, units of a norm)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import Refreshed, restored
from rkfac.curvature.factor.lowrank import LowRankFactor
from rkfac.linalg import DecompositionError, Intact, LowRank
from rkfac.linalg.symmetric import (
    folded,
    folded_shape,
    mirrored,
    packed,
    packed_elements,
    strip_elements,
    strips_of,
    unfolded,
    unpacked,
)

SMALL_DAMPING = 5e-4  # in units of the largest eigenvalue: below it a refresh works and keeps its basis in float64
NOISE = 1e-2  # by which rounding may change what the smallest modes are multiplied by
TYPICAL_RANK = 256
LARGEST_SHIFT = 2.0**100  # beyond it a matrix with entries of about one vanishes beside the identity


class DenseFactor(LowRankFactor):
    """`shape` is (d,) or (groups, d); the value is flat, the strips of `linalg/symmetric.py`."""

    kind = "dense"

    def _zero(self) -> Tensor:
        return self._like.new_zeros(*self.shape[:-1], strip_elements(self.shape[-1]))

    def _strips(self, value: Tensor) -> list[Tensor]:
        return strips_of(value, self.shape[-1])

    def whole(self) -> tuple[Tensor, float]:
        """The value as a symmetric matrix and its unit: their product is the average without its identity."""
        return self._whole(), 2.0**self._exponent

    def _whole(self) -> Tensor:
        """The value as a symmetric matrix, which whoever asks lets go again."""
        if not self.here:
            raise RuntimeError("another process keeps this average (memory='owned'): ask there")
        return mirrored(self._present, self.shape[-1])

    def refresh(self, request: Request) -> Refreshed[LowRank]:
        """A strategy decomposes the value; units and the identity are put back afterwards."""
        unit, identity = 2.0**self._exponent, self._identity
        inside = min(identity / unit, LARGEST_SHIFT) if self.start.sketched and identity else 0.0
        if inside == LARGEST_SHIFT:
            unit = identity / inside
        request = replace(
            request,
            matrix=self._whole(),
            start=self._basis if request.start is None else request.start,
            shift=inside,
            # The identity that is kept apart damps like the damping itself.
            offset=0.0 if self.start.sketched else identity / unit,
            damping=request.damping if request.relative else request.damping / unit,
        )
        if self._ill_conditioned(request):
            request = replace(request, matrix=request.X.double())
        low = request.strategy.decompose(request)
        low = low.shifted(0.0 if self.start.sketched else identity, scale=unit)
        return self._made(low)

    def intact(self, request: Request) -> Refreshed[LowRank] | None:
        """Unless the damping is so small that more digits than these would be needed."""
        if len(self.shape) > 1 or request.relative:
            return None
        unit, identity, matrix = 2.0**self._exponent, self._identity, self._whole()
        if self._ill_conditioned(
            replace(request, matrix=matrix, offset=identity / unit, damping=request.damping / unit)
        ):
            return None
        low, trace = Intact(matrix, unit, identity, request.name), self.trace()
        try:
            low.damped_inverse(request.damping)
        except DecompositionError:
            return None
        return Refreshed(low, trace / self.shape[-1], torch.ones_like(trace))

    def _ill_conditioned(self, request: Request) -> bool:
        """Whether the damping in force is so small that eigenvectors of float32 are not good enough for it."""
        # At most; its entries are about one, so that no square overflows.
        largest = float(torch.linalg.vector_norm(request.X, dim=(-2, -1)).amax())
        damping = request.offset + request.shift + (0.0 if request.relative else request.damping)
        damping += request.damping * largest if request.relative else 0.0
        # What leaks out of the largest mode into the smallest is multiplied by the ratio of both to this power.
        bound = max(SMALL_DAMPING ** (-1 / request.power), -request.power * torch.finfo(request.X.dtype).eps / NOISE)
        return damping < bound * largest

    @property
    def refresh_cost(self) -> int:
        """Cubic while small, quadratic where it is sketched."""
        return math.prod(self.shape) * self.shape[-1] * min(self.shape[-1], TYPICAL_RANK)

    def dense(self) -> Tensor:
        """2^exponent * value + identity * I."""
        value = self._whole().double() * 2.0**self._exponent
        value.diagonal(dim1=-2, dim2=-1).add_(self._identity)
        return value

    def spectrum(self) -> Tensor:
        """Exact, so O(d^3)."""
        return torch.linalg.eigvalsh(self.dense()).flip(-1).clamp_min(0)

    def trace(self) -> Tensor:
        """A number a group."""
        if self._away is not None:
            return self._away + self._identity * self.shape[-1]
        parts = [strip.diagonal(dim1=-2, dim2=-1) for strip in self._strips(self._present)]
        # One part is summed where it lies: nothing to copy, and a copy may be summed in another order.
        diagonal = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return diagonal.double().sum(-1) * 2.0**self._exponent + self._identity * self.shape[-1]

    def _saved(self, value: Tensor) -> Tensor:
        return folded(value, self.shape[-1])

    @property
    def saved_shape(self) -> torch.Size:
        """The folded upper half."""
        return torch.Size((*self.shape[:-1], *folded_shape(self.shape[-1])))

    def _loaded(self, saved: Any) -> Tensor:
        return unfolded(restored(saved, tuple(self.saved_shape), self._like, self._like.dtype), self.shape[-1])

    @property
    def sum_shape(self) -> torch.Size:
        """The entries on and above the diagonal."""
        return torch.Size((*self.shape[:-1], packed_elements(self.shape[-1])))

    def _sent(self, value: Tensor) -> Tensor:
        return packed(value, self.shape[-1])

    def _received(self, entries: Tensor) -> Tensor:
        return unpacked(entries, self.shape[-1])

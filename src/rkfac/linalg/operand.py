"""The matrix that a routine multiplies by: X + shift I near unit size, formed by nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from rkfac.linalg.checks import DecompositionError, require_finite, require_shift, require_square, require_symmetric
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.scaling import magnitude, power_near, unit_scale
from rkfac.linalg.shapes import Float


@dataclass(frozen=True, eq=False)
class Operand:
    """scale (X + shift I), scale a power of two a matrix: known by its products, never formed."""

    X: Float[Tensor, "*batch d d"]
    shift: float
    scale: Float[Tensor, "*batch"]
    name: str

    @classmethod
    def of(cls, X: Tensor, shift: float, name: str) -> Operand:
        """Measured on the diagonal, which holds the largest entry of a PSD matrix: O(d)."""
        require_square(X, name)
        require_shift(shift, X.dtype)
        peak = X.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
        require_finite(peak, name)
        return cls(X, shift, unit_scale(peak.clamp_min(abs(shift))), name)

    def __matmul__(self, Q: Tensor) -> Tensor:
        """scale (X Q + shift Q); half of the scale goes to Q so that X Q itself stays in range."""
        half = power_near(self.scale.sqrt())
        Z = (self.X @ (Q * half[..., None, None])).mul_((self.scale / half)[..., None, None])
        if self.shift != 0:
            Z.addcmul_(Q, (self.scale.double() * self.shift).to(Q.dtype)[..., None, None])
        if not bool(torch.isfinite(Z.sum())):  # entries are at most about d: a sum of finite ones is finite
            self._refuse()
        return Z

    def _refuse(self) -> NoReturn:
        """Say what is wrong with an X larger than its diagonal allows; only now is a pass over d x d worth it."""
        require_finite(self.X, self.name)
        require_symmetric(self.X * unit_scale(magnitude(self.X, (-2, -1))), self.name)
        raise DecompositionError(f"{self.name} is not positive semi-definite: it has entries far beyond its diagonal")

    def projection(self, Q: Tensor, Z: Tensor) -> Tensor:
        """Q^T Z, symmetrised, where Z is the product with Q; an X that is not symmetric is refused here."""
        C = Q.mT @ Z
        peak = magnitude(C, (-2, -1))
        unit = unit_scale(peak)
        require_symmetric(C * unit, self.name, unit.amax((-2, -1)))  # the diagonal of X is near one here
        if bool((peak > 32 * Q.shape[-2]).any()):  # the trace bounds a PSD matrix, and it is at most 16 d here
            self._refuse()
        return (C + C.mT) / 2

    def check(self, Q: Tensor, Z: Tensor, columns: int = 16) -> None:
        """The refusals of `projection` for those who need no projection, seen on a few columns.

        The first is among them, for it has the size of X, by which asymmetry is measured, and the last, which is fresh.
        """
        few = torch.linspace(0, Q.shape[-1] - 1, min(columns, Q.shape[-1]), device=Q.device).round().long()
        self.projection(Q[..., few], Z[..., few])

    def trace(self) -> Tensor:
        """In float64: the sum of d large entries may leave float32's range."""
        values = self.X.diagonal(dim1=-2, dim2=-1).double() + self.shift
        return values.sum(-1) * self.scale.double()

    def unscaled(self, low: LowRank) -> LowRank:
        """The decomposition of X + shift I from the one of its scaled self."""
        return unscaled(low, self.scale, self.name)


def unscaled(low: LowRank, scale: Tensor, name: str, dtype: torch.dtype | None = None) -> LowRank:
    """A decomposition divided by a scale a matrix; refused where the values leave the range of their dtype."""
    dtype = low.s.dtype if dtype is None else dtype
    s = (low.s / scale[..., None]).to(dtype)
    if not bool(torch.isfinite(s).all()):
        raise DecompositionError(f"the largest eigenvalue of {name} is beyond the range of {dtype}")
    return LowRank(low.U, s, None if low.tail is None else (low.tail / scale).to(dtype))

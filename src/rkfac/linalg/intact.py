"""`Intact`: a matrix that is kept as it is, for factors whose damped inverse is cheaper than their eigenpairs.

A Cholesky inverse takes a fifth of the time of an eigendecomposition and solves just as well. Whoever asks for eigenpairs all the
same, as spectra, other powers and measures of change do, gets them, and waits for them once.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rkfac.linalg import lapack
from rkfac.linalg.checks import DecompositionError
from rkfac.linalg.exact import eigh
from rkfac.linalg.lowrank import LowRank, relative
from rkfac.linalg.scaling import times
from rkfac.linalg.shapes import Float


class Inverse(NamedTuple):
    """A damped inverse in units of its largest entry, that unit, and a bound on its condition."""

    matrix: Float[Tensor, "d d"]
    unit: float
    condition: float


class Intact(LowRank):
    """scale * matrix + shift * I, of full rank; `matrix` (d, d) has entries of about one."""

    def __init__(self, matrix: Float[Tensor, "d d"], scale: float, shift: float, name: str = "the matrix") -> None:
        known: dict[float, Inverse] = {}
        fields = {"matrix": matrix, "scale": scale, "shift": shift, "name": name, "_known": known}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    matrix: Tensor
    scale: float
    shift: float
    name: str
    _known: dict[float, Inverse]  # the last inverse, by its damping

    @cached_property
    def _decomposed(self) -> LowRank:
        return eigh(self.matrix, name=self.name).shifted(self.shift, scale=self.scale)

    @property
    def U(self) -> Tensor:
        """Made when it is asked for."""
        return self._decomposed.U

    @property
    def s(self) -> Tensor:
        """Made when it is asked for."""
        return self._decomposed.s

    @property
    def tail(self) -> Tensor | None:
        """Nothing is discarded."""
        return None

    @property
    def largest(self) -> Float[Tensor, ""]:
        """At most the Frobenius norm: nobody waits for eigenvalues to look at it."""
        return torch.linalg.vector_norm(self.matrix).double() * self.scale + self.shift

    @property
    def dim(self) -> int:
        """Size d of the matrix."""
        return self.matrix.shape[-1]

    @property
    def rank(self) -> int:
        """All of it."""
        return self.dim

    def permuted(self, order: Tensor) -> Intact:
        """The same matrix with rows and columns in another order."""
        other = Intact(self.matrix[order][:, order], self.scale, self.shift, self.name)
        for damping, (inverse, unit, condition) in self._known.items():
            other._known[damping] = Inverse(inverse[order][:, order], unit, condition)
        return other

    def __matmul__(self, V: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
        """The matrix times V."""
        size = max(self.scale, self.shift)
        product = (self.matrix.to(V.dtype) @ V) * (self.scale / size) + V * (self.shift / size)
        return times(product, torch.tensor(size, dtype=torch.float64, device=V.device))

    def distance(self, other: LowRank) -> float:
        """||X - Y||_F / ||Y||_F, Y being `other`."""
        if not isinstance(other, Intact):
            return super().distance(other)
        size = max(self.scale, self.shift, other.scale, other.shift)
        mine, theirs = self._in_units(size), other._in_units(size)
        return relative(float((mine - theirs).square().sum()), float(theirs.square().sum()))

    def _in_units(self, size: float) -> Tensor:
        """In float64."""
        whole = self.matrix.double() * (self.scale / size)
        whole.diagonal().add_(self.shift / size)
        return whole

    def damped_inverse(self, damping: float) -> Inverse:
        """(X + damping I)^-1; DecompositionError where rounding leaves that indefinite, or the damping is none beside X."""
        if damping not in self._known:
            inverse = self._inverse(damping)
            self._known.clear()
            self._known[damping] = inverse
        return self._known[damping]

    def _inverse(self, damping: float) -> Inverse:
        least = (self.shift + damping) / self.scale  # what the matrix stands on, in its own units
        peak = torch.linalg.vector_norm(self.matrix).item()
        limit = torch.finfo(self.matrix.dtype).max / 4
        if not 0 < least < limit or not math.isfinite(peak):
            raise DecompositionError(
                f"{self.name} has no damped inverse: its damping is {least:.3g} in units of its entries"
            )
        damped = self.matrix.clone()
        damped.diagonal().add_(least)
        inverse = lapack.definite_inverse(damped, self.name)
        if inverse is None:
            raise DecompositionError(
                f"{self.name} is not positive definite, damped by {least:.3g} in units of its entries"
            )
        unit = inverse.diagonal().amax().item()
        return Inverse(inverse.div_(unit), unit / self.scale, 1 + peak / least)

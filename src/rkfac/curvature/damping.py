"""Damping rules: small values that answer every question about damping.

A rule knows what `damping` means (absolute, or in units of the largest eigenvalue), how it is shared between a layer's two
factors, what the damped inverse and the damped curvature are, and which damping a factor of its own is up against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.factor import DenseFactor, Factor
from rkfac.linalg import Diagonal, LowRank, Multipliers, factored, product

Low = LowRank | Diagonal


@dataclass(frozen=True)
class Damping(ABC):
    """One rule; `relative`: damping is measured in units of the largest eigenvalue."""

    relative: bool = True

    @abstractmethod
    def shares(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """What is added to the input and to the output factor's eigenvalues, a number a group, in float64."""

    def multipliers(self, damping: float, A: Factor[Any], G: Factor[Any]) -> Multipliers:
        """The damped inverse of the two factors in use."""
        damping_A, damping_G = self.shares(damping, A, G)
        return factored(G.low, A.low, damping_G, damping_A)

    def multiply(self, D: Tensor, damping: float, A: Factor[Any], G: Factor[Any]) -> Tensor:
        """The damped curvature times D: (G + l_G) D (A + l_A)."""
        damping_A, damping_G = (l[..., None, None].to(D) for l in self.shares(damping, A, G))
        right = (A.low @ D.mT).mT + damping_A * D
        return G.low @ right + damping_G * right

    @abstractmethod
    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """The damping one factor is up against before its decomposition is known, and whether it is relative."""

    def unit(self, damping: float, factor: DenseFactor) -> Tensor:
        """What is added to the small blocks of a norm: one number for all units."""
        largest = factor.low.s.amax()
        return in_units_of(damping, largest) if self.relative else torch.full_like(largest, damping)


@dataclass(frozen=True)
class Factored(Damping):
    """l on each factor: the paper's rule (Algorithms 1 and 4)."""

    def shares(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """damping, or damping times each factor's own largest eigenvalue."""
        largest = A.low.s.amax(-1), G.low.s.amax(-1)
        if self.relative:
            return in_units_of(damping, largest[0]), in_units_of(damping, largest[1])
        return torch.full_like(largest[0], damping), torch.full_like(largest[1], damping)

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """Itself."""
        return damping, self.relative


class _Joint(Damping):
    """Rules that damp the product of both spectra."""

    def total(self, damping: float, A: Factor[Any], G: Factor[Any]) -> Tensor:
        """What is added to the product of eigenvalues."""
        largest = A.low.s.amax(-1) * G.low.s.amax(-1)
        return in_units_of(damping, largest) if self.relative else torch.full_like(largest, damping)


@dataclass(frozen=True)
class Product(_Joint):
    """l on the product spectrum: (A (x) G + l I)^-1."""

    def shares(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """The whole damping stands on the input side; the output side is 1 by convention."""
        total = self.total(damping, A, G)
        return total, torch.ones_like(total)

    def multipliers(self, damping: float, A: Factor[Any], G: Factor[Any]) -> Multipliers:
        """Does not factor."""
        return product(G.low, A.low, self.total(damping, A, G))

    def multiply(self, D: Tensor, damping: float, A: Factor[Any], G: Factor[Any]) -> Tensor:
        """G D A + l D."""
        return G.low @ (A.low @ D.mT).mT + self.total(damping, A, G)[..., None, None].to(D) * D

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """l divided by the other factor's largest eigenvalue, or by its trace while that is not known."""
        if self.relative:
            return damping, True
        largest = other.low.s.amax() if other.ready else other.trace().amax()
        return (damping / float(largest), False) if largest > 0 else (damping, False)


@dataclass(frozen=True)
class Pi(_Joint):
    """sqrt(l) on each factor, times and over the square root of the ratio of their mean eigenvalues (Martens, Grosse)."""

    def shares(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """pi sqrt(l) and sqrt(l) / pi."""
        total, ratio = self.total(damping, A, G).sqrt(), _ratio(A.mean, G.mean)
        return ratio * total, total / ratio

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """pi sqrt(l), from the traces and, for a relative l, from the last known largest eigenvalues."""
        own_mean, other_mean = (f.trace().mean() / f.shape[-1] for f in (own, other))
        total = torch.as_tensor(damping, dtype=torch.float64, device=own_mean.device)
        if self.relative:
            for factor, mean in ((own, own_mean), (other, other_mean)):
                total = total * (factor.low.s.amax() if factor.ready else mean)
        share = float(_ratio(own_mean, other_mean) * total.sqrt())
        return (share, False) if share > 0 else (damping, self.relative)


def in_units_of(largest_share: float, largest: Tensor) -> Tensor:
    """share * largest; 1 where nothing was seen yet, so that a dead layer keeps its plain gradient."""
    return torch.where(largest > 0, largest_share * largest, torch.ones_like(largest))


def _ratio(mean_A: Tensor, mean_G: Tensor) -> Tensor:
    known = (mean_A > 0) & (mean_G > 0)
    return torch.where(known, mean_A / torch.where(known, mean_G, 1.0), 1.0).sqrt()


RULES: dict[str, type[Damping]] = {"factored": Factored, "product": Product, "pi": Pi}

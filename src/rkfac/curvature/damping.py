"""Damping rules: small values that answer every question about damping.

A rule knows what `damping` means (absolute, or in units of the mean or the largest eigenvalue), how it is shared between a
layer's two factors, what the damped inverse and the damped curvature are, and which damping a factor is up against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rkfac.curvature.factor import Factor
from rkfac.linalg import Diagonal, Energies, LowRank, Multipliers, factored, product, products

Low = LowRank | Diagonal


class Known(Protocol):
    """What a rule asks of a factor whose decomposition is in use, wherever that is kept."""

    @property
    def low(self) -> Low:
        """The decomposition."""

    @property
    def mean(self) -> Tensor:
        """Mean eigenvalue when that was made, a number a group."""

    @property
    def learns(self) -> bool:
        """Whether it is more than an identity that stands for a side left out."""


@dataclass(frozen=True)
class Damping(ABC):
    """One rule; damping is measured in units of a factor's "mean" or "largest" eigenvalue, or is absolute (None).

    The damped curvature is taken to `power`: -1 is the natural gradient, -1/2 what Shampoo and Adam do.
    """

    relative_to: str | None = "mean"
    power: float = -1.0

    @property
    def inverts(self) -> bool:
        """Whether all it asks of a factor are its trace and the inverse of the damped factor."""
        return self.power == -1.0 and self.relative_to != "largest"

    def size(self, factor: Known) -> Tensor:
        """The eigenvalue that damping is measured in, a number a group; 1 for an absolute damping."""
        if self.relative_to is None:
            return torch.ones_like(factor.mean)
        return factor.mean if self.relative_to == "mean" else factor.low.s.amax(-1)

    def expected_size(self, factor: Factor[Any]) -> Tensor:
        """The same, one number, before the coming decomposition: from the trace, and the last largest eigenvalue."""
        mean = factor.trace().mean() / factor.shape[-1]
        if self.relative_to is None:
            return torch.ones_like(mean)
        return factor.low.s.amax() if self.relative_to == "largest" and factor.ready else mean

    @abstractmethod
    def shares(self, damping: float, A: Known, G: Known) -> tuple[Tensor, Tensor]:
        """What is added to the input and to the output factor's eigenvalues, a number a group, in float64."""

    def beside(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """What the eigenvalues of the input and of the output factor in use are to be compared with."""
        return self.shares(damping, A, G)

    def multipliers(self, damping: float, A: Factor[Any], G: Factor[Any]) -> Multipliers:
        """The damped inverse of the two factors in use, or another power."""
        damping_A, damping_G = self.shares(damping, A, G)
        return factored(G.low, A.low, damping_G, damping_A, self.power)

    def eigenvalues(self, damping: float, A: Known, G: Known) -> Tensor:
        """Of the damped curvature, one for every pair of modes: a row a mode of G, rests last."""
        damping_A, damping_G = self.shares(damping, A, G)
        return products(G.low, A.low, damping_G, damping_A)

    def beside_moments(self, damping: float, moments: Energies) -> Tensor:
        """What is added to second moments that stand in the place of products of eigenvalues, a number a group."""
        if self.relative_to is None:
            return torch.full_like(moments.largest, damping)
        return in_units_of(damping, moments.mean() if self.relative_to == "mean" else moments.largest)

    def multiply(self, D: Tensor, damping: float, A: Factor[Any], G: Factor[Any]) -> Tensor:
        """The damped curvature times D: (G + l_G) D (A + l_A)."""
        damping_A, damping_G = (l[..., None, None].to(D) for l in self.shares(damping, A, G))
        right = (A.low @ D.mT).mT + damping_A * D
        return G.low @ right + damping_G * right

    @abstractmethod
    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """The damping one factor is up against before its decomposition is known, and whether it is relative."""

    def alone(self, damping: float, own: Factor[Any]) -> tuple[float, bool]:
        """The same for a factor that has no partner; the largest eigenvalue is best known to the decomposition."""
        if self.relative_to == "largest":
            return damping, True
        return float(in_units_of(damping, self.expected_size(own))), False

    def unit(self, damping: float, factor: Known) -> Tensor:
        """What is added to the small blocks of a norm: one number for all units."""
        sizes = self.size(factor)
        return in_units_of(damping, sizes.mean() if self.relative_to == "mean" else sizes.amax())


@dataclass(frozen=True)
class Factored(Damping):
    """l on each factor: the paper's rule (Algorithms 1 and 4)."""

    def shares(self, damping: float, A: Known, G: Known) -> tuple[Tensor, Tensor]:
        """damping, or damping times each factor's own mean or largest eigenvalue."""
        of_A, of_G = (in_units_of(damping, self.size(factor)) * factor.learns for factor in (A, G))
        return of_A, of_G

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """Whatever the other one is."""
        return self.alone(damping, own)


class _Joint(Damping):
    """Rules that damp the product of both spectra."""

    def total(self, damping: float, A: Known, G: Known) -> Tensor:
        """What is added to the product of eigenvalues."""
        return in_units_of(damping, self.size(A) * self.size(G))

    def expected_total(self, damping: float, own: Factor[Any], other: Factor[Any]) -> Tensor:
        """The same, before the coming decomposition."""
        return in_units_of(damping, self.expected_size(own) * self.expected_size(other))


@dataclass(frozen=True)
class Product(_Joint):
    """l on the product spectrum: (A (x) G + l I)^-1."""

    @property
    def inverts(self) -> bool:
        """No: it acts on both factors at once."""
        return False

    def shares(self, damping: float, A: Known, G: Known) -> tuple[Tensor, Tensor]:
        """The whole damping stands on the input side; the output side is 1 by convention."""
        total = self.total(damping, A, G)
        return total, torch.ones_like(total)

    def beside(self, damping: float, A: Factor[Any], G: Factor[Any]) -> tuple[Tensor, Tensor]:
        """The whole damping over the other side's largest eigenvalue: beside the products that are damped least."""
        total = self.total(damping, A, G)
        of_A, of_G = (torch.where(f.low.largest > 0, total / f.low.largest, total) for f in (G, A))
        return of_A, of_G

    def multipliers(self, damping: float, A: Factor[Any], G: Factor[Any]) -> Multipliers:
        """Does not factor."""
        return product(G.low, A.low, self.total(damping, A, G), self.power)

    def eigenvalues(self, damping: float, A: Known, G: Known) -> Tensor:
        """g a + l."""
        return products(G.low, A.low) + self.total(damping, A, G)[..., None, None]

    def multiply(self, D: Tensor, damping: float, A: Factor[Any], G: Factor[Any]) -> Tensor:
        """G D A + l D."""
        return G.low @ (A.low @ D.mT).mT + self.total(damping, A, G)[..., None, None].to(D) * D

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """l divided by the other factor's largest eigenvalue, or by its trace while that is not known."""
        if self.relative_to == "largest":
            return damping, True
        largest = other.low.s.amax() if other.ready else other.trace().amax()
        total = self.expected_total(damping, own, other)
        return float(torch.where(largest > 0, total / largest, total)), False


@dataclass(frozen=True)
class Pi(_Joint):
    """sqrt(l) on each factor, times and over the square root of the ratio of their mean eigenvalues (Martens, Grosse)."""

    def shares(self, damping: float, A: Known, G: Known) -> tuple[Tensor, Tensor]:
        """pi sqrt(l) and sqrt(l) / pi."""
        total = self.total(damping, A, G)
        if not (A.learns and G.learns):  # the other side is the identity, and stays it
            return total * A.learns, total * G.learns
        total, ratio = total.sqrt(), _ratio(A.mean, G.mean)
        return ratio * total, total / ratio

    def in_force(self, damping: float, own: Factor[Any], other: Factor[Any]) -> tuple[float, bool]:
        """pi sqrt(l), from the traces and, for an l in units of the largest eigenvalues, from the last known ones."""
        total = self.expected_total(damping, own, other)
        if not other.learns:
            return float(total), False
        own_mean, other_mean = (f.trace().mean() / f.shape[-1] for f in (own, other))
        return float(_ratio(own_mean, other_mean) * total.sqrt()), False


def in_units_of(damping: float, size: Tensor) -> Tensor:
    """damping * size; 1 where nothing was seen yet, so that a dead layer keeps its plain gradient."""
    return torch.where(size > 0, damping * size, torch.ones_like(size))


def _ratio(mean_A: Tensor, mean_G: Tensor) -> Tensor:
    known = (mean_A > 0) & (mean_G > 0)
    return torch.where(known, mean_A / torch.where(known, mean_G, 1.0), 1.0).sqrt()


RULES: dict[str, type[Damping]] = {"factored": Factored, "product": Product, "pi": Pi}

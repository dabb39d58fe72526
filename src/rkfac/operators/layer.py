"""One layer's curvature as it was found, before any damping: eigenpairs of both sides, and the rule that damps them.

Values that nothing changes later: an optimizer's next refresh makes new ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rkfac.curvature.damping import Damping, Known, Low
from rkfac.linalg import Diagonal, Energies, LowRank, products, spectral
from rkfac.operators.layout import Layout
from rkfac.operators.operator import Operator


@dataclass(frozen=True, eq=False)
class Side:
    """Eigenpairs of one side and the mean eigenvalue of what they were made of; `learns` is False for a side left out."""

    low: Low
    mean: Tensor
    learns: bool = True

    def packed(self) -> dict[str, Tensor]:
        """As tensors by name."""
        tensors = {"s": self.low.s, "mean": self.mean}
        if isinstance(self.low, LowRank):
            tensors["U"] = self.low.U
            tensors |= {} if self.low.tail is None else {"tail": self.low.tail}
        return {name: t.contiguous() for name, t in tensors.items()}


def side_of(factor: Known) -> Side:
    """What is in use of a factor."""
    return Side(factor.low, factor.mean, factor.learns)


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """`parameters` are the names of what it acts on; `samples`: of how many it is the mean, None for a running average."""

    name: str
    parameters: tuple[str, ...]
    layout: Layout
    rule: Damping
    damping: float
    samples: int | None
    input: Side
    output: Side

    kind: ClassVar[str]

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Damped, one for every pair of modes, rests last."""

    def operator(self) -> Operator:
        """The damped curvature."""
        values = self.eigenvalues()
        return Operator(self.name, self.parameters, self.layout, spectral(self.output.low, self.input.low, values))

    def packed(self) -> dict[str, Tensor]:
        """All tensors by name."""
        sides = {"input": self.input, "output": self.output}
        tensors = {f"{side}.{key}": t for side, kept in sides.items() for key, t in kept.packed().items()}
        return tensors if self.layout.order is None else tensors | {"order": self.layout.order}


@dataclass(frozen=True, eq=False)
class Kronecker(Layer):
    """A (x) G, damped as the rule says."""

    kind = "kronecker"

    def eigenvalues(self) -> Tensor:
        """The rule's."""
        return self.rule.eigenvalues(self.damping, self.input, self.output)


@dataclass(frozen=True, eq=False)
class Units(Layer):
    """A small block a unit, on the input side; one damping for all."""

    kind = "units"

    def eigenvalues(self) -> Tensor:
        """s + l."""
        return products(self.output.low, self.input.low, 0.0, self.rule.unit(self.damping, self.input))


@dataclass(frozen=True, eq=False)
class Moments(Layer):
    """EK-FAC: second moments in the bases of two factors in the place of products of their eigenvalues."""

    moments: Energies
    kind = "moments"

    def eigenvalues(self) -> Tensor:
        """M + l."""
        return self.moments.means + self.rule.beside_moments(self.damping, self.moments)[..., None, None]

    def packed(self) -> dict[str, Tensor]:
        """The moments too."""
        return {**super().packed(), "moments": self.moments.means}


def damped(layer: Layer, damping: float, rule: Damping | None = None) -> Layer:
    """The same with another damping."""
    return replace(layer, damping=damping, rule=layer.rule if rule is None else rule)


def one_row(like: Tensor) -> Side:
    """The output side of units, which have none: a single mode of eigenvalue one."""
    one = torch.ones(1, dtype=torch.float64, device=like.device)
    return Side(Diagonal(one), one[0], learns=False)

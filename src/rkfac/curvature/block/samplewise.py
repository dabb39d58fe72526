"""Layers known by the gradients of one batch's samples: F = U^T U, and its damped inverse by a kernel of samples."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.kernel import Basis, Sketch, loaded, saved, tensors_of
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.factor import Refreshed
from rkfac.curvature.following import Origin
from rkfac.curvature.randomness import subset
from rkfac.curvature.samples import Gathered, Piece
from rkfac.curvature.statistics import Statistics
from rkfac.layers.base import Adapter, Use, statistics_dtype
from rkfac.linalg import (
    SAFE,
    Everything,
    Grid,
    Outer,
    Places,
    Rows,
    Sample,
    Whole,
    Woodbury,
    at_once,
    number,
    unit_of,
    woodbury,
)


class GradientsBlock(Block):
    """S = (F + l I)^-1 J = 1/l [J - U^T (l I + U U^T)^-1 U J], with the rows u_n of one batch and no average."""

    kind = "sample-wise"
    positions_summed = True
    period = "inverse_every"

    def __init__(self, uses: Sequence[Use], adapter: Adapter, settings: Settings) -> None:
        self.sketch: Sketch = settings.method
        super().__init__(uses, adapter, settings)

    def _make(self) -> None:
        """Nothing is known."""
        self._basis: Basis | None = None
        self._fresh: tuple[Rows, float] | None = None  # since the last refresh
        self._updates = 0

    # --- the layer

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(groups, d_G, d_A) of its gradient as matrices, the bias being the last column."""

    @abstractmethod
    def _samples(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Samples in a call."""

    @abstractmethod
    def _piece(self, use: Use, x: Tensor, g: Tensor, drawn: Tensor | None, weight: float) -> Piece:
        """The gradients of a call's samples, or of those drawn, times the root of the weight."""

    @abstractmethod
    def _matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Tensors like the parameters, as one of `shape`."""

    @abstractmethod
    def _tensors(self, matrix: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inverse of `_matrix`."""

    @property
    def explicit(self) -> bool:
        """Whether rows are sampled by their entries, as if they had been formed."""
        return math.prod(self.shape) <= self.sketch.explicit_up_to

    @property
    def ready(self) -> bool:
        """Whether some batch's gradients are in use."""
        return self._basis is not None

    @property
    def updates(self) -> int:
        """Batches that were taken."""
        return self._updates

    @property
    def refresh_cost(self) -> float:
        """The kernel, for as many samples everywhere."""
        q = self.sketch.columns
        return float(math.prod(self.shape) if q is None else min(math.prod(self.shape), q * q))

    def _follow(self) -> None:
        if self._basis is not None and self._basis.inverse.values.device != self.weight.device:
            self._basis = loaded(saved(self._basis), self.weight)

    # --- statistics

    def statistics(self) -> Statistics:
        """Of rows, sample by sample."""
        return Statistics((Gathered(),))

    def discard(self) -> None:
        """Drop what is pending."""
        super().discard()
        self._last: tuple[Any, int, Tensor | None, float] | None = None

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Calls within a pass are positions of the same samples, calls in another are more samples."""
        self._pass = one_pass
        super().observe(use, x, g, one_pass, terms)

    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """The gradients of a call's samples, or of some drawn in their place."""
        samples = self._samples(use, x, g)
        joins = self._last is not None and self._last[:2] == (self._pass, samples)
        if not joins:
            self._last = (self._pass, samples, *self.draw(samples, g.device))
        assert self._last is not None
        self.pending.moments[0].add(self._piece(use, x, g, *self._last[2:]), joins)
        return samples

    def blend(self, group: Group) -> None:
        """The batch waits for its refresh."""
        self._fresh = self.pending.moments[0].taken()
        self._updates += 1

    @property
    def addable(self) -> bool:
        """No: samples are kept one by one."""
        return False

    # --- basis

    def asks(self, due: bool) -> bool:
        """When a batch has come: there is nothing else to refresh from."""
        return self._fresh is not None

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """The kernel of the fresh batch."""
        if self._fresh is None:
            return
        (rows, size), self._fresh = self._fresh, None
        name = f"the kernel of {self.name!r}"
        if not self.explicit and isinstance(rows, Outer) and self.sketch.positions is not None:
            rows = rows.shortened(self.sketch.positions, name)
        mixed = self.sketch.product == "published" and not self.explicit and isinstance(rows, Outer)
        self._basis = Basis(woodbury(rows, self._sampled(rows), mixed, name), size)

    def _sampled(self, rows: Rows) -> Sample:
        """q^2 entries of a row, or q rows and q columns of its matrix where it is kept as products."""
        q = self.sketch.columns
        if q is None:
            return Everything()
        device = self.weight.device
        if self.explicit or not isinstance(rows, Outer):
            return (
                Places(self._drawn("entries", rows.entries, q * q).to(device)) if rows.entries > q * q else Everything()
            )
        _, d_G, d_A = rows.shape
        i = self._drawn("output", d_G, q).to(device) if d_G > q else None
        j = self._drawn("input", d_A, q).to(device) if d_A > q else None
        return Everything() if i is None and j is None else Grid(i, j)

    def _drawn(self, what: str, of: int, count: int) -> Tensor:
        return subset(of, count, self.settings.randomness.generator("columns", self.name, what, self.version))

    # --- step

    def _damping(self, group: Group) -> tuple[Tensor, Tensor]:
        """In units of the rows, and in true ones."""
        assert self._basis is not None
        in_units = self._basis.damping(group["damping"], self.settings.damping.relative_to)
        return in_units, in_units * self._basis.size

    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """One product with U, one with its transpose, and a kernel between them in float64."""
        with self.timed("apply"):
            self._follow()
            assert self._basis is not None
            in_units, damping = self._damping(group)
            inverse = self._basis.inverse
            inside = in_units / inverse.share if self.sketch.scaling == "published" else in_units
            thin = self._thin(gradients, inverse, inside, damping) if inverse.mixed else None
            if thin is not None:
                return thin
            unit = unit_of(gradients)
            J = self._matrix(gradients, statistics_dtype(self.weight))
            if at_once(unit) and SAFE[0] < float(unit) < SAFE[1]:
                unit = torch.ones_like(unit)
            else:
                J = J / unit.to(J.dtype)
            solved = inverse.solve(J, inside)
            return Direction(
                tuple(map(Whole, self._tensors(solved, gradients))),
                number(unit / damping),
                J.numel(),
                given=lambda: number(torch.linalg.vector_norm(J).double() * unit),
                length=number(torch.linalg.vector_norm(solved).double()),
                along=lambda: number((solved.double() * J.double()).sum() * unit),
            )

    def _thin(
        self, gradients: Sequence[Tensor], inverse: Woodbury, inside: Tensor, damping: Tensor
    ) -> Direction | None:
        """The same where U^T b is a product of thin matrices, without a tensor of the weight's size; None: it takes one."""
        return None

    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """(F + l I) times a change, with all entries of F's rows."""
        self._follow()
        assert self._basis is not None
        D = self._matrix(change, statistics_dtype(self.weight))
        product = self._basis.inverse.multiply(D) * self._basis.size + self._damping(group)[1].to(D) * D
        return self._tensors(product, change)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Also the rows that are in use, and the decomposition of their kernel."""
        basis = None if self._basis is None else saved(self._basis)
        return {**super().state_dict(), "updates": self._updates, "basis": basis}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved, onto the model's device."""
        super().load_state_dict(state)
        updates, basis = state["updates"], state["basis"]
        if isinstance(updates, bool) or not isinstance(updates, int) or updates < (basis is not None):
            raise ValueError(f"the saved state counts {updates!r} batches")
        if basis is not None:
            self._basis = loaded(basis, self.weight)
            if self._basis.inverse.rows.shape != self.shape:
                raise ValueError(f"the saved gradients are of shape {self._basis.inverse.rows.shape}, not {self.shape}")
        self._updates = updates

    def facts(self, group: Group) -> dict[str, Any]:
        """Sizes, samples in use and the damping."""
        groups, d_G, d_A = self.shape
        facts: dict[str, Any] = {"input_dim": d_A, "output_dim": groups * d_G}
        if self._basis is not None:
            facts["damping_output"] = float(self._damping(group)[1])
        return facts

    @property
    def nbytes(self) -> dict[str, int]:
        """The rows stand where others keep factors."""
        if self._basis is None:
            return {"factors": 0, "basis": 0}
        inverse = self._basis.inverse
        kept = {t.data_ptr(): t.nbytes for rows in (inverse.rows, inverse.seen) for t in tensors_of(rows)}
        return {"factors": sum(kept.values()), "basis": inverse.values.nbytes + inverse.vectors.nbytes}

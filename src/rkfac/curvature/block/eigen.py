"""EK-FAC: the Kronecker factors' bases, with running second moments in them in the place of products of eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block.kronecker import KroneckerBlock, kronecker_of
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.factor import Refreshed
from rkfac.curvature.factor.base import restored
from rkfac.layers.base import MAX_CHUNK, KroneckerAdapter, Use
from rkfac.linalg import Energies, Multipliers, energies, preconditioner


@dataclass(frozen=True)
class Eigen:
    """Where the second moments come from: "samples" (statistics steps) or "running" (the gradient of every step).

    `decay` is that of the running ones; `carry`: a new basis takes them over, otherwise it starts from K-FAC's product.
    """

    moments: str
    decay: float
    carry: bool


class EigenBlock(KroneckerBlock):
    """S = U_G [U_G^T J U_A / (M + l)] U_A^T, and the rests of a truncated basis each with a mean of its own."""

    kind = "eigenbasis"
    may_invert = False

    def __init__(self, uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> None:
        self.method: Eigen = settings.method
        self.learns = self.method.moments == "running"
        super().__init__(uses, adapter, settings)

    def _make(self) -> None:
        """Two factors, and no moments before there is a basis."""
        super()._make()
        self._energies: Energies | None = None
        self._samples = 0  # N at the last statistics

    @property
    def energies(self) -> Energies:
        """The moments in the basis in use."""
        if self._energies is None:
            raise RuntimeError("this layer was never refreshed")
        return self._energies

    def _follow(self) -> None:
        super()._follow()
        if self._energies is not None and self._energies.means.device != self.weight.device:
            self._energies = self._energies.to(self.weight.device)

    # --- statistics

    def discard(self) -> None:
        """Drop what is pending, squares too."""
        super().discard()
        self._squares: Tensor | None = None

    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Rows for the factors and, once there is a basis, the squared coordinates of each sample's gradient."""
        if self.method.moments == "samples" and self.ready:
            self._follow()
            for squares in self._squared(use, x, g):
                self._squares = squares if self._squares is None else self._squares + squares
        return super().collect(use, x, g)

    def _squared(self, use: Use, x: Tensor, g: Tensor) -> Iterator[Tensor]:
        """Of one call's samples, or of some drawn in their place; calls of one pass count as samples of their own."""
        sharing, G, A = self.settings.weight_sharing, self.output.low, self.input.low
        adapter, module = kronecker_of(use), use.module
        known = adapter.samples(module, x)
        samples = adapter.count(module, g, sharing) if known is None else known
        positions = adapter.positions(module, g) // samples
        drawn, weight = self.draw(samples, g.device, positions, "samples")
        if adapter.diagonal_input():
            tokens = x.flatten() if drawn is None else x.flatten()[drawn]
            lookups = adapter.output_rows(module, x, g, sharing, drawn)
            yield energies.of_lookups(G, A.dim, tokens, lookups) * weight
            return
        d_G, d_A = math.prod(self.output.shape), math.prod(self.input.shape)
        chunk = max(1, MAX_CHUNK // (positions * (d_G + d_A) + (positions > 1) * d_G * d_A))
        numbers = torch.arange(samples, device=g.device) if drawn is None else drawn
        for some in (drawn,) if len(numbers) <= chunk else numbers.split(chunk):
            inputs, gradients = adapter.by_sample(module, x, g, self.bias, sharing, some)
            if self.settings.loss_average == "tokens":  # then every position has a loss of its own
                inputs, gradients = (t.flatten(-3, -2).unsqueeze(-2) for t in (inputs, gradients))
            yield energies.of_rows(G, A, gradients, inputs) * weight

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Also whether what was squared is finite is read with the rest."""
        super().observe(use, x, g, one_pass, terms)
        self.pending.others = [] if self._squares is None else [self._squares.sum()]

    def beside(self) -> list[Tensor]:
        """The squared coordinates, which every process has in the same basis."""
        if self.method.moments != "samples" or not self.ready:
            return []
        return [torch.zeros_like(self.energies.means) if self._squares is None else self._squares]

    def pooled_beside(self, totals: Sequence[Tensor]) -> None:
        """Those of all processes."""
        if totals:
            (self._squares,) = totals
            self.pending.others = [self._squares.sum()]

    def commit(self, group: Group, numbers: list[float], loss_scale: float) -> bool:
        """The moments with the factors, at the factors' decay."""
        pending, squares, settings = self.pending, self._squares, self.settings
        if not super().commit(group, numbers, loss_scale):
            return False
        self._samples = pending.samples(settings.loss_average)
        if squares is not None:
            scale = pending.of_squares(settings.loss_average, settings.sampled, loss_scale)
            self._take(squares.to(self.weight.device) * scale, self.decay(group))
        return True

    def learn(self, gradients: tuple[Tensor, ...], group: Group) -> None:
        """N (U_G^T J U_A)^2, what the mean square of N samples' gradients would be if their mean were zero."""
        with self.timed("statistics"):
            self._follow()
            squares = energies.of_matrix(self.output.low, self.input.low, self._joined(gradients))
            scale = self._samples if self.settings.loss_average != "sum" else 1 / self._samples
            self._take(squares * scale, self.method.decay)

    def _take(self, means: Tensor, decay: float) -> None:
        self._energies, self._prepared = self.energies.blended(means, decay), None

    # --- basis

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """Both factors; the moments go along, or start anew from the product of eigenvalues."""
        before = (self.output.low, self.input.low) if self.ready else None
        super().decompose(group, made)
        now = self.output.low, self.input.low
        if before is not None and self.method.carry:
            shares = (new.shares_of(old) for new, old in zip(now, before, strict=True))
            self._energies = self.energies.carried(*shares)
        else:
            # As the factors' averages, one without a start of its own is replaced by the first statistic.
            weight = self.settings.start.weight if self.method.carry else 1.0
            self._energies = energies.of_product(*now, weight)

    def _adopted(self, refreshed: Refreshed[Any]) -> Refreshed[Any]:
        """Moments of modes that rounding alone tells apart would be arbitrary: such modes are part of the rest."""
        return replace(refreshed, low=refreshed.low.distinct())

    # --- step

    def _damping(self, damping: float) -> Tensor:
        """What is added to all moments, a number a group."""
        return self.settings.damping.beside_moments(damping, self.energies)

    def _multipliers(self, damping: float) -> Multipliers:
        """(M + l)^power."""
        return self.energies.multipliers(self._damping(damping), self.settings.damping.power)

    def _curved(self, D: Tensor, damping: float) -> Tensor:
        """U_G [(M + l) * U_G^T D U_A] U_A^T, and the rests."""
        multipliers = self.energies.multipliers(self._damping(damping), 1.0)
        return preconditioner(self.input.low, self.output.low, multipliers).solve(D, None).dense(D, None).to(D.dtype)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Also the moments, which belong to the basis that is saved beside them."""
        found = self._energies
        saved = None if found is None else {"means": found.means, "weight": found.weight}
        return {**super().state_dict(), "energies": saved, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        super().load_state_dict(state)
        saved, samples = state["energies"], state["samples"]
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ValueError(f"the saved state counts {samples!r} samples")
        if (saved is not None) != self.ready:
            raise ValueError("the saved state has a basis without moments in it, or moments without a basis")
        self._samples = samples
        if saved is None:
            return
        if (samples > 0) != self.observed:
            raise ValueError(f"the saved state has moments of {samples} samples")
        like = energies.of_product(self.output.low, self.input.low, 0.0)
        means, weight = (
            restored(saved[key], tuple(t.shape), t, t.dtype)
            for key, t in (("means", like.means), ("weight", like.weight))
        )
        if bool((means < 0).any()) or not 0 <= float(weight) <= 1:
            raise ValueError("the saved state has second moments that are none")
        self._energies = Energies(means, like.beyond, weight)

    @property
    def nbytes(self) -> dict[str, int]:
        """The moments belong to the basis."""
        known = super().nbytes
        return known | {"basis": known["basis"] + (0 if self._energies is None else self._energies.means.nbytes)}

    def _visible(self, group: Group) -> dict[str, float]:
        """Its damping stands beside second moments, not beside eigenvalues."""
        return {}

    def facts(self, group: Group) -> dict[str, Any]:
        """The whole damping stands on the input side, as under the product rule."""
        facts = super().facts(group)
        return facts | ({"damping_input": float(self._damping(group["damping"]).mean())} if self.ready else {})

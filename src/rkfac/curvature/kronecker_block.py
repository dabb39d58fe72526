"""Linear and convolution layers: two running factors, a damping rule, the two-sided solve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.block import Block, DenseDirection, Group, LayerDirection, Settings, add_part, relative_to
from rkfac.curvature.factor import DiagonalFactor, Factor, Pending
from rkfac.layers.base import KroneckerAdapter, statistics_dtype
from rkfac.linalg import (
    Diagonal,
    Direction,
    LowRank,
    Spectrum,
    factored_spectrum,
    precondition,
    precondition_diagonal,
    product_spectrum,
)


class KroneckerBlock(Block):
    """S = (G + l I)^-1 J (A + l I)^-1 or one of its kin, with the bias as last column of J."""

    def __init__(self, name: str, module: nn.Module, adapter: KroneckerAdapter, settings: Settings) -> None:
        super().__init__(name, module, adapter, settings)
        self.adapter = adapter
        self._diagonal: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything: at the start, and when the set of trained parameters changes."""
        super().reset()
        like = torch.empty(0, dtype=statistics_dtype(self.weight), device=self.weight.device)
        identity = self.settings.identity_start
        shape = self.adapter.input_shape(self.module, self.bias)
        self.input: Factor | DiagonalFactor
        if self.adapter.diagonal_input():
            self.input = DiagonalFactor(shape[0], identity, like)
        else:
            self.input = Factor(shape, identity, like)
        self.output = Factor(self.adapter.output_shape(self.module), identity, like)
        self._traces: tuple[Tensor, Tensor] | None = None
        self._spectrum: tuple[tuple[int, float], Spectrum] | None = None

    @property
    def ready(self) -> bool:
        """Both factors are decomposed."""
        return self.output.low is not None and self._traces is not None

    # --- statistics

    @property
    def width(self) -> int:
        """Outputs of all groups."""
        return math.prod(self.adapter.output_shape(self.module))

    def collect(self, x: Tensor, g: Tensor) -> int:
        """Rows of this call join what is pending."""
        rows = self.adapter.output_rows(self.module, x, g, self.settings.weight_sharing)
        self._pending_output.add(rows, g)
        for part in self.adapter.input_rows(self.module, x, self.bias, self.settings.weight_sharing):
            if self.adapter.diagonal_input():
                self._diagonal = part if self._diagonal is None else self._diagonal + part
            else:
                self._pending_input.add(part, x)
        return rows.shape[-2]

    def pending_size(self) -> Tensor | None:
        """Finite exactly when all rows are."""
        if self._rows == 0:
            return None
        size = self._pending_output.size()
        return size if self.adapter.diagonal_input() else size + self._pending_input.size()

    def discard(self) -> None:
        """Drop the pending rows."""
        super().discard()
        self._pending_input, self._pending_output = Pending(), Pending()
        self._diagonal = None

    def commit(self, group: Group, loss_scale: Tensor | None) -> None:
        """Both averages take the step's statistics."""
        with self.timed("statistics"):
            self._follow()
            scale_input, scale_output = self.scales(loss_scale)
            if isinstance(self.input, DiagonalFactor):
                assert self._diagonal is not None
                self.input.update(self._diagonal, group["factor_decay"], scale_input)
            else:
                self.input.update(self._pending_input, group["factor_decay"], scale_input)
            self.output.update(self._pending_output, group["factor_decay"], scale_output)
            self.discard()

    def _follow(self) -> None:
        """Go where the model went."""
        device = self.weight.device
        for factor in (self.input, self.output):
            if factor.average.value.device != device:
                factor.average.value = factor.average.value.to(device)
                if isinstance(factor, DiagonalFactor):
                    factor.low = None if factor.low is None else factor.low.to(device)
                elif factor.low is not None:
                    factor.low = _moved(factor.low, device)
                self._spectrum = None
                if self._traces is not None:
                    self._traces = (self._traces[0].to(device), self._traces[1].to(device))

    # --- basis

    @property
    def observed(self) -> bool:
        """Whether any statistic ever came in."""
        return self.output.average.updates > 0

    def decompose(self, group: Group) -> None:
        """Both factors; nothing changes if either fails."""
        self._follow()
        low_input = self._decomposed(self.input, group, "input") if isinstance(self.input, Factor) else None
        low_output = self._decomposed(self.output, group, "output")
        if isinstance(self.input, DiagonalFactor):
            self.input.adopt()
        elif low_input is not None:
            self.input.adopt(low_input)
        self.output.adopt(low_output)
        self._traces = (_mean_eigenvalue(self.input), _mean_eigenvalue(self.output))

    def _decomposed(self, factor: Factor, group: Group, side: str) -> LowRank:
        request = self.settings.request(group, f"the {side} factor of {self.name!r}")
        return self.settings.decomposition.refresh(factor.average.value, factor.low, request)

    def _input_eigenvalues(self) -> LowRank | Diagonal:
        assert self.input.low is not None
        return Diagonal(self.input.low) if isinstance(self.input, DiagonalFactor) else self.input.low

    def dampings(self, group: Group) -> tuple[Tensor, Tensor]:
        """Damping of the input and of the output factor; for the product rule the second is 1 by convention."""
        A, G = self._input_eigenvalues(), self.output.low
        assert G is not None
        assert self._traces is not None
        damping, relative = group["damping"], self.settings.relative_damping
        largest_A = A.s.amax(-1)
        largest_G = G.s.amax(-1)
        if self.settings.damping_rule == "factored":
            if relative:
                return relative_to(damping, largest_A), relative_to(damping, largest_G)
            return torch.full_like(largest_A, damping), torch.full_like(largest_G, damping)
        total = relative_to(damping, largest_A * largest_G) if relative else torch.full_like(largest_G, damping)
        if self.settings.damping_rule == "product":
            return total, torch.ones_like(total)
        mean_A, mean_G = self._traces
        known = (mean_A > 0) & (mean_G > 0)
        ratio = torch.where(known, mean_A / torch.where(known, mean_G, 1.0), 1.0).sqrt()
        return ratio * total.sqrt(), total.sqrt() / ratio

    def spectrum(self, group: Group) -> Spectrum:
        """The damped inverse spectrum, computed once for a basis and a damping."""
        key = (self.version, float(group["damping"]))
        if self._spectrum is None or self._spectrum[0] != key:
            A, G = self._input_eigenvalues(), self.output.low
            assert G is not None
            damping_A, damping_G = self.dampings(group)
            product = self.settings.damping_rule == "product"
            made = product_spectrum(G, A, damping_A) if product else factored_spectrum(G, A, damping_G, damping_A)
            self._spectrum = (key, made)
        return self._spectrum[1]

    # --- step

    def _gradient(self, index: int) -> Tensor:
        """The weight's gradient as a matrix or the bias's as a vector, in the factors' precision."""
        parameter = self.parameters[index]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        shaped = self.adapter.vector if index else self.adapter.matrix
        return shaped(self.module, gradient).to(self.output.average.value.dtype)

    def direction(self, group: Group) -> LayerDirection:
        """The two-sided solve, kept in factored form."""
        with self.timed("apply"):
            self._follow()
            J, j = self._gradient(0), self._gradient(1) if self.bias else None
            G, A = self.output.low, self._input_eigenvalues()
            assert G is not None
            if isinstance(A, Diagonal):
                S = precondition_diagonal(J, G, self.spectrum(group))
                return DenseDirection((S,), S.square().sum(), (S * J).sum())
            return precondition(J, j, G, A, self.spectrum(group))

    def add(self, direction: Any, index: int, target: Tensor, factor: Tensor | None, alpha: float) -> None:
        """In place on a view of the target where its layout and precision allow it."""
        with self.timed("apply"):
            shaped = self.adapter.vector if index else self.adapter.matrix
            if isinstance(direction, DenseDirection):
                add_part(direction.parts[0].mT, target, factor, alpha)
                return
            gradient = self._gradient(index)
            view = shaped(self.module, target)
            in_place = view.data_ptr() == target.data_ptr() and view.dtype == gradient.dtype
            work = view if in_place else torch.zeros_like(view, dtype=gradient.dtype)
            assert isinstance(direction, Direction)
            if index == 0:
                direction.add_weight(work, gradient, factor, alpha)
            else:
                direction.add_bias(work, gradient, factor, alpha)
            if not in_place:
                target.add_(work.reshape(target.shape).to(target.dtype))

    def curvature(self, change: tuple[Tensor, ...], group: Group) -> Tensor:
        """<D, (G + l) D (A + l)> for the factored rules, <D, G D A> + l |D|^2 for the product rule."""
        dtype = self.output.average.value.dtype
        D = self.adapter.matrix(self.module, change[0]).to(dtype)
        if self.bias:
            D = torch.cat([D, self.adapter.vector(self.module, change[1]).to(dtype)[..., None]], dim=-1)
        G, A = self.output.low, self._input_eigenvalues()
        assert G is not None
        damping_A, damping_G = (l[..., None, None] for l in self.dampings(group))
        right = D * A.s if isinstance(A, Diagonal) else (A @ D.mT).mT
        if self.settings.damping_rule == "product":
            return (D * (G @ right)).sum() + (damping_A * D.square()).sum()
        right = right + damping_A * D
        return (D * (G @ right + damping_G * right)).sum()

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Averages and present bases."""
        state: dict[str, Any] = {
            "bias": self.bias,
            "input": self.input.average.state_dict(),
            "output": self.output.average.state_dict(),
            "failures": self.failures,
            "version": self.version,
        }
        if self.ready:
            assert self._traces is not None
            state["traces"] = list(self._traces)
            for side, factor in (("input_basis", self.input), ("output_basis", self.output)):
                if isinstance(factor, DiagonalFactor):
                    state[side] = [factor.low]
                elif factor.low is not None:
                    state[side] = [factor.low.U, factor.low.s, factor.low.tail, factor.captured]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Averages and bases, onto the model's device."""
        self.reset()
        if state["bias"] != self.bias:
            raise ValueError("the saved state was made with another choice of trained biases")
        self.input.average.load_state_dict(state["input"])
        self.output.average.load_state_dict(state["output"])
        self.failures, self.version = int(state["failures"]), int(state["version"])
        like = self.output.average.value
        for side, factor in (("input_basis", self.input), ("output_basis", self.output)):
            if side in state and isinstance(factor, DiagonalFactor):
                factor.low = state[side][0].to(like, copy=True)
            elif side in state and isinstance(factor, Factor):
                U, s, *optional = state[side]
                tail, factor.captured = (None if t is None else t.to(like, copy=True) for t in optional)
                factor.low = LowRank(U.to(like, copy=True), s.to(like, copy=True), tail)
        if "traces" in state:
            first, second = (t.to(like, copy=True) for t in state["traces"])
            self._traces = (first, second)

    def facts(self, group: Group) -> dict[str, Any]:
        """Sizes, ranks, captured trace, dampings, bytes."""
        input_low = self.input.low if isinstance(self.input, Factor) else None
        output_low = self.output.low
        facts: dict[str, Any] = {
            "input_dim": self.adapter.input_shape(self.module, self.bias)[-1],
            "output_dim": self.adapter.output_shape(self.module)[-1],
            "rank_input": None if input_low is None else input_low.rank,
            "rank_output": None if output_low is None else output_low.rank,
            "captured_input": _number(self.input.captured) if isinstance(self.input, Factor) else None,
            "captured_output": _number(self.output.captured),
        }
        if self.ready:
            damping_A, damping_G = self.dampings(group)
            facts["damping_input"] = float(damping_A.mean())
            facts["damping_output"] = float(damping_G.mean())
        factors = self.input.average.value.nbytes + self.output.average.value.nbytes
        basis = sum(low.U.nbytes for low in (input_low, output_low) if low is not None)
        facts["bytes"] = {"factors": factors, "basis": basis}
        return facts


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


def _moved(low: LowRank, device: torch.device) -> LowRank:
    return LowRank(low.U.to(device), low.s.to(device), None if low.tail is None else low.tail.to(device))


def _mean_eigenvalue(factor: Factor | DiagonalFactor) -> Tensor:
    """tr X / d, a number a group."""
    value = factor.average.value
    return value.mean() if isinstance(factor, DiagonalFactor) else value.diagonal(dim1=-2, dim2=-1).mean(-1)

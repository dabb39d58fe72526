"""Scale-and-shift layers: a 1 x 1 or 2 x 2 Fisher block a unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rkfac.curvature.block import Block, DenseDirection, Group, LayerDirection, Settings, add_part, relative_to
from rkfac.curvature.factor import UnitFactor
from rkfac.layers.base import UnitAdapter, statistics_dtype


class UnitBlock(Block):
    """(F_u + l I)^-1 [dscale_u, dshift_u] for every unit u; a relative l is measured in the largest eigenvalue of all."""

    def __init__(self, name: str, module: nn.Module, adapter: UnitAdapter, settings: Settings) -> None:
        super().__init__(name, module, adapter, settings)
        self.adapter = adapter
        self._pending: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything: at the start, and when the set of trained parameters changes."""
        super().reset()
        like = torch.empty(0, dtype=statistics_dtype(self.weight), device=self.weight.device)
        self.factor = UnitFactor(self.weight.numel(), 1 + self.bias, like, self.settings.identity_start)
        self._blocks: Tensor | None = None  # as of the last refresh
        self._inverse: tuple[tuple[int, float], Tensor] | None = None

    @property
    def ready(self) -> bool:
        """Whether it was ever refreshed."""
        return self._blocks is not None

    @property
    def observed(self) -> bool:
        """Whether any statistic ever came in."""
        return self.factor.average.updates > 0

    @property
    def width(self) -> int:
        """Units."""
        return self.weight.numel()

    def collect(self, x: Tensor, g: Tensor) -> int:
        """Outer products of per-sample gradients."""
        u = self.adapter.unit_gradients(self.module, x, g)  # (n, units, k)
        moment = torch.einsum("nui,nuj->uij", u, u)
        self._pending = moment if self._pending is None else self._pending + moment
        return u.shape[0]

    def pending_size(self) -> Tensor | None:
        """Finite exactly when the pending moment is."""
        return None if self._pending is None else self._pending.sum()

    def discard(self) -> None:
        """Drop the pending moment."""
        super().discard()
        self._pending = None

    def commit(self, group: Group, loss_scale: Tensor | None) -> None:
        """The average takes the step's statistics."""
        with self.timed("statistics"):
            assert self._pending is not None
            self._follow()
            # Positions are summed inside a sample already.
            self.factor.update(self._pending, group["factor_decay"], self.gradient_scale(1.0, loss_scale))
            self.discard()

    def _follow(self) -> None:
        device = self.weight.device
        if self.factor.average.value.device != device:
            self.factor.average.value = self.factor.average.value.to(device)
            self._blocks = None if self._blocks is None else self._blocks.to(device)
            self._inverse = None

    def decompose(self, group: Group) -> None:
        """Blocks this small are inverted when they are applied; here the present average is taken over."""
        self._follow()
        if not bool(torch.isfinite(self.factor.average.value).all()):
            raise ValueError(f"the unit blocks of {self.name!r} hold NaN or Inf")
        self._blocks = self.factor.average.value.clone()

    def damping(self, group: Group) -> Tensor:
        """The number added to every block's diagonal."""
        assert self._blocks is not None
        if not self.settings.relative_damping:
            return self._blocks.new_tensor(group["damping"])
        return relative_to(group["damping"], torch.linalg.eigvalsh(self._blocks)[..., -1].amax())

    def direction(self, group: Group) -> LayerDirection:
        """Small solves, all units at once."""
        with self.timed("apply"):
            self._follow()
            assert self._blocks is not None
            key = (self.version, float(group["damping"]))
            if self._inverse is None or self._inverse[0] != key:
                eye = torch.eye(1 + self.bias, dtype=self._blocks.dtype, device=self._blocks.device)
                self._inverse = (key, torch.linalg.inv(self._blocks + self.damping(group) * eye))
            gradients = self._stacked(
                tuple(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters)
            )
            solved = (self._inverse[1] @ gradients[..., None]).squeeze(-1)
            parts = tuple(solved[:, i].reshape(p.shape) for i, p in enumerate(self.parameters))
            return DenseDirection(parts, solved.square().sum(), (solved * gradients).sum())

    def _stacked(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([t.flatten().to(self.factor.average.value.dtype) for t in tensors], dim=-1)

    def add(self, direction: Any, index: int, target: Tensor, factor: Tensor | None, alpha: float) -> None:
        """Scale is parameter 0, shift parameter 1."""
        add_part(direction.parts[index], target, factor, alpha)

    def curvature(self, change: tuple[Tensor, ...], group: Group) -> Tensor:
        """Sum of the small quadratic forms."""
        assert self._blocks is not None
        d = self._stacked(change)
        return torch.einsum("ui,uij,uj->", d, self._blocks, d) + self.damping(group) * d.square().sum()

    def state_dict(self) -> dict[str, Any]:
        """The average and the blocks in use."""
        state = {"bias": self.bias, "average": self.factor.average.state_dict(), "failures": self.failures}
        return {**state, "version": self.version, "blocks": self._blocks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Onto the model's device."""
        self.reset()
        if state["bias"] != self.bias:
            raise ValueError("the saved state was made with another choice of trained biases")
        self.factor.average.load_state_dict(state["average"])
        self.failures, self.version = int(state["failures"]), int(state["version"])
        blocks = state["blocks"]
        self._blocks = None if blocks is None else blocks.to(self.factor.average.value, copy=True)

    def facts(self, group: Group) -> dict[str, Any]:
        """Units stand on the output side."""
        facts: dict[str, Any] = {"input_dim": 1 + self.bias, "output_dim": self.weight.numel()}
        if self._blocks is not None:
            facts["damping_output"] = float(self.damping(group))
        facts["bytes"] = {"factors": self.factor.average.value.nbytes, "basis": self.factor.average.value.nbytes}
        return facts

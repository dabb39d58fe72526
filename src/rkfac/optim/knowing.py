"""What an optimizer can say of itself, and the curvature it has, without anything being changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rkfac import compat
from rkfac.curvature.block import Block, Settings
from rkfac.layers import own_parameters
from rkfac.operators import Curvature, Operator
from rkfac.optim.advice import Advice, advice
from rkfac.optim.arguments import check_group
from rkfac.optim.coverage import LeftOut
from rkfac.optim.gate import Gate
from rkfac.optim.report import (
    Factors,
    Members,
    Report,
    Spectra,
    covered_layer,
    described,
    factors,
    numbers_of,
    spectra,
    uncovered_layer,
)
from rkfac.optim.report_text import listed
from rkfac.optim.snapshot import curvature_of, require_known


class Knowing(torch.optim.Optimizer):
    """The part of the shell that answers questions."""

    _model: nn.Module
    _blocks: dict[str, Block]
    _reasons: dict[str, LeftOut]
    _settings: Settings
    _gate: Gate
    _fallback: str
    _group_of: dict[int, dict[str, Any]]
    _step: int
    _taken: int
    _stepped: float

    def _all_parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _group(self, block: Block) -> dict[str, Any]:
        return self._group_of.get(id(block.weight), self.param_groups[0])

    def report(self) -> Report:
        """One record a layer: what it keeps and costs, or why it is left to the fallback rule; printed, it is a table.

        Seconds are the host's on a CPU and the device's own on a GPU, which is waited for here and never in a step.
        """
        # Of a sharded model whole parameters may stand in the places of the shards for a while: nobody is asked then.
        named = {} if compat.fully_sharded(self._model) else dict(self._model.named_parameters())
        members = Members({id(p) for p in self._all_parameters()}, {id(p) for p in named.values()} if named else None)
        covered = [covered_layer(block, self._group(block), members, self._in_place) for block in self._blocks.values()]
        left = [
            uncovered_layer(name, left, members, self._group_of_any(left.parameters))
            for name, left in self._reasons.items()
        ]
        outside = {name: members.counts([p])["outside"] for name, p in named.items() if p.requires_grad}
        refused = tuple(name for name, times in self._gate.counts.items() if times)
        began = [block.began for block in self._blocks.values() if block.began is not None]
        elapsed = max(self._stepped - min(began), 0.0) if began else 0.0
        names = ("rows", "tail", "eager_start")
        settings = {**numbers_of(self.param_groups[0]), **{name: getattr(self._settings, name) for name in names}}
        untouched = {name: count for name, count in outside.items() if count}
        layers = [*covered, *left]
        return Report(layers, self._step, elapsed, self._fallback, settings, refused, untouched, self._taken)

    def _group_of_any(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """The group of the first of these that is in one."""
        return next((self._group_of[id(p)] for p in parameters if id(p) in self._group_of), {})

    def _in_place(self, block: Block) -> list[nn.Parameter]:
        """What the model holds in the places of a layer whose weight was replaced."""
        modules = dict(self._model.named_modules())
        others = {id(p) for other in self._blocks.values() if other is not block for p in other.owned}
        now = (p for use in block.uses if use.name in modules for p in own_parameters(modules[use.name]).values())
        return [p for p in now if id(p) not in others]

    def advise(self) -> Advice:
        """What the numbers of `report()` mean, in words: one remark for each thing that stands out, none if nothing does."""
        return advice(self.report())

    def spectrum(self, name: str) -> Spectra:
        """Exact eigenvalues of a layer's two running factors, descending."""
        return spectra(self._blocks, name)

    def factors(self, name: str) -> Factors:
        """Copies of a layer's two running factors, whole matrices in float64: O(d^2) memory, for looking at."""
        return factors(self._blocks, name)

    @overload
    def curvature(self, name: str, damping: float | None = None) -> Operator: ...
    @overload
    def curvature(self, name: None = None, damping: float | None = None) -> Curvature: ...
    def curvature(self, name: str | None = None, damping: float | None = None) -> Operator | Curvature:
        """A layer's damped curvature as an operator (`@`, `solve`, `sqrt_solve`, `logdet`, `trace`, `diagonal`), or all layers'.

        It stays what it is now, whatever the optimizer does later. `damping`: another one than that in force.
        """
        if damping is not None:
            check_group({"damping": damping})

        def in_force(block: Block) -> float:
            return self._group(block)["damping"] if damping is None else damping

        if name is None:
            return curvature_of(self._model, self._blocks, self._reasons, in_force)
        require_known(name, self._blocks, self._reasons)
        return curvature_of(self._model, {name: self._blocks[name]}, {}, in_force)[name]

    @overload
    def inverse_vector_product(
        self, tensors: Mapping[str, Tensor], uncovered: float | None = ...
    ) -> dict[str, Tensor]: ...
    @overload
    def inverse_vector_product(
        self, tensors: Sequence[Tensor | None], uncovered: float | None = ...
    ) -> list[Tensor | None]: ...
    def inverse_vector_product(self, tensors: Any, uncovered: float | None = None) -> Any:
        """The damped inverse of all layers times a vector: one tensor (or None) a parameter of the model, or by their names.

        Parameters that no layer with a basis covers are refused, unless `uncovered` is given: their curvature is then that
        number times the identity. For many vectors make `optimizer.curvature()` once, which has the same method.
        """
        return self.curvature().inverse_vector_product(tensors, uncovered)

    def _words(self) -> str:
        """What it does, in a few words."""
        return f"{self._settings.decomposition!r}, damping {self._settings.damping!r}"

    def __repr__(self) -> str:
        """What a person wants to know of it."""
        first = {k: v for k, v in self.param_groups[0].items() if k not in ("params", "param_names")}
        own = self._all_parameters()
        total = sum(p.numel() for p in own if not isinstance(p, UninitializedParameter))
        held = {id(p) for p in own}
        rest = [name for name, left in self._reasons.items() if any(id(p) in held for p in left.parameters)]
        lines = [
            f"{type(self).__name__}(",
            f"  {described(self._blocks.values(), held)} of {total:,} parameters;",
            f"  the rest trains by {self._fallback!r}" + (f" ({listed(rest)})" if rest else ""),
            f"  {self._words()}, step {self._step}",
            "  " + ", ".join(f"{k}={v}" for k, v in first.items()),
            ")",
        ]
        return "\n".join(lines)

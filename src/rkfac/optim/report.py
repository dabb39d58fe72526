"""What an optimizer knows about itself, as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rkfac.curvature.block import Block, Group
from rkfac.curvature.factor import Factor
from rkfac.curvature.kronecker_block import KroneckerBlock


@dataclass(frozen=True)
class LayerReport:
    """One layer: how it is preconditioned, or why it is not. Inputs are the A side, outputs the G (Gamma) side."""

    name: str
    kind: str
    covered: bool
    reason: str = ""
    parameters: int = 0
    input_dim: int | None = None
    output_dim: int | None = None
    rank_input: int | None = None
    rank_output: int | None = None
    captured_input: float | None = None
    captured_output: float | None = None
    damping_input: float | None = None
    damping_output: float | None = None
    clip: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    failures: int = 0


class Spectra(NamedTuple):
    """Eigenvalues of a layer's two running factors, descending, in float64."""

    input: Tensor
    output: Tensor


def covered_layer(block: Block, group: Group) -> LayerReport:
    """A preconditioned layer as it stands."""
    return LayerReport(
        name=block.name,
        kind=type(block.module).__name__,
        covered=True,
        reason="" if block.observed else "no statistics yet: it was not called in training mode",
        parameters=sum(p.numel() for p in block.parameters),
        clip=None if block.clip is None else float(block.clip),
        seconds=dict(block.seconds),
        failures=block.failures,
        **block.facts(group),
    )


def uncovered_layer(name: str, module: nn.Module, reason: str) -> LayerReport:
    """A layer that trains by the fallback rule, and why."""
    own = [p for p in module._parameters.values() if p is not None and not isinstance(p, UninitializedParameter)]
    return LayerReport(
        name, type(module).__name__, covered=False, reason=reason, parameters=sum(p.numel() for p in own)
    )


def spectra(blocks: Mapping[str, Block], name: str) -> Spectra:
    """Exact eigenvalues of a layer's running factors."""
    block = blocks.get(name)
    if not isinstance(block, KroneckerBlock):
        known = [n for n, b in blocks.items() if isinstance(b, KroneckerBlock)]
        raise ValueError(f"no preconditioned layer is called {name!r}; there are {listed(known)}")
    diagonal = block.input.average.value.double()
    values = block.input.spectrum() if isinstance(block.input, Factor) else diagonal.sort(descending=True)[0]
    return Spectra(values, block.output.spectrum())


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names for a sentence."""
    ordered = list(names)
    shown = ", ".join(repr(name) for name in ordered[:most])
    return (shown + f" and {len(ordered) - most} more" if len(ordered) > most else shown) or "nothing"

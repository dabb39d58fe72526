"""What an optimizer knows about itself, as records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


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

"""What an optimizer knows about itself, as records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from rkfac import compat
from rkfac.curvature.block import Block, Group
from rkfac.optim.coverage import LeftOut


@dataclass(frozen=True)
class LayerReport:
    """One layer: how it is preconditioned, or why it is not. Inputs are the A side, outputs the G (Gamma) side."""

    name: str
    kind: str
    covered: bool
    reason: str = ""
    parameters: int = 0
    shared_with: tuple[str, ...] = ()  # other layers that own the same weight, preconditioned with it
    input_dim: int | None = None
    output_dim: int | None = None
    kept_input: str | None = None  # "dense", "diagonal", "identity", "online" or "columns": how a factor is kept
    kept_output: str | None = None
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
    interval: int | None = None  # steps from one look at its curvature to the next, with stale=


class Spectra(NamedTuple):
    """Eigenvalues of a layer's two running factors, descending, in float64."""

    input: Tensor
    output: Tensor


def covered_layer(block: Block, group: Group) -> LayerReport:
    """A layer with a block as it stands: preconditioned, or why not at the moment."""
    reason, covered = "", True
    if block.retired:
        reason, covered = block.retired, False
    elif not block.weight.requires_grad:
        reason, covered = "its weight is frozen (requires_grad=False)", False
    elif not block.observed:
        reason = "no statistics yet: no backward pass has reached its weight through a call of it"
        if block.missed:
            reason = (
                "no statistics yet: gradients came, but no call of it was seen (compiled before, another object, or an "
                "unknown way to multiply by its weight)"
            )
    elif not block.ready:
        reason = "no decomposition has succeeded yet: it takes plain steps meanwhile"
    own = block.owned if not covered else block.parameters
    return LayerReport(
        name=block.name,
        kind=compat.kind_of(block.module).__name__,
        covered=covered,
        reason=reason,
        parameters=sum(p.numel() for p in own),
        shared_with=tuple(use.name for use in block.uses[1:]),
        clip=None if block.clip is None else float(block.clip),
        seconds=block.seconds,
        bytes=block.nbytes,
        failures=block.failures,
        interval=None if block.pace is None else block.pace.interval,
        **block.facts(group),
    )


def uncovered_layer(name: str, left: LeftOut) -> LayerReport:
    """A layer, or a parameter of one, that trains by the fallback rule, and why."""
    own = [p for p in left.parameters if not isinstance(p, UninitializedParameter)]
    return LayerReport(name, left.kind, covered=False, reason=left.reason, parameters=sum(p.numel() for p in own))


def spectra(blocks: Mapping[str, Block], name: str) -> Spectra:
    """Exact eigenvalues of a layer's running factors."""
    two_sided = {n: b for n, b in blocks.items() if len(b.factors) == 2}
    if name not in two_sided:
        raise ValueError(f"no preconditioned layer is called {name!r}; there are {listed(two_sided)}")
    return Spectra(*two_sided[name].spectra())


def described(blocks: Iterable[Block]) -> str:
    """How many layers of which kind, and how many parameters they hold."""
    blocks = list(blocks)
    counts = Counter(block.kind for block in blocks)
    kinds = " and ".join(f"{count} {kind} layers" for kind, count in counts.items()) or "no layers"
    return f"{kinds} hold {sum(p.numel() for block in blocks for p in block.parameters):,}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """A few names for a sentence."""
    ordered = list(names)
    shown = ", ".join(repr(name) for name in ordered[:most])
    return (shown + f" and {len(ordered) - most} more" if len(ordered) > most else shown) or "nothing"

"""What an optimizer knows about itself, as records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from rkfac import compat
from rkfac.curvature.block import Block, Group
from rkfac.optim.coverage import LeftOut
from rkfac.optim.report_text import listed, summary, table


@dataclass(frozen=True)
class LayerReport:
    """One layer: how it is preconditioned, or why it is not. Inputs are the A side, outputs the G (Gamma) side."""

    name: str
    kind: str
    covered: bool
    reason: str = ""
    parameters: int = 0
    trained: int = 0  # of these parameters
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
    largest_input: float | None = None  # largest eigenvalue in units of the damping; where it is not known, a bound
    largest_output: float | None = None
    cut_input: float | None = None  # how many times too far a step may go along what was cut off; None: nothing was
    cut_output: float | None = None
    updates: int = 0  # statistics that entered its averages
    rows: int = 0  # that its gradient was the sum of at the last of them
    steps: int = 0  # that this object has preconditioned
    clip: float | None = None
    clipped: int = 0  # of those steps: how many the clip has shortened
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    interval: int | None = None  # steps from one look at its curvature to the next, with stale=


class Report(list[LayerReport]):
    """One record a layer; printed, a table and a few lines about all of them.

    `steps` were taken, by the first group's `settings`; `seconds` passed from the first statistic to the end of the last
    step, whatever else was done in them; `fallback` trains what is not covered; the last updates of `refused` layers were
    not finite.
    """

    def __init__(
        self,
        layers: Iterable[LayerReport] = (),
        steps: int = 0,
        seconds: float = 0.0,
        fallback: str = "sgd",
        settings: Mapping[str, Any] | None = None,
        refused: tuple[str, ...] = (),
    ) -> None:
        super().__init__(layers)
        self.steps, self.seconds, self.fallback = steps, seconds, fallback
        self.settings, self.refused = dict(settings or {}), refused

    def __str__(self) -> str:
        return "\n".join([*table(self), *summary(self)])

    __repr__ = __str__

    @property
    def trained(self) -> int:
        """Parameters that are trained, covered or not."""
        return sum(layer.trained for layer in self)

    @property
    def covered_share(self) -> float:
        """Of the trained parameters; 1 where there are none."""
        covered = sum(layer.trained for layer in self if layer.covered)
        return covered / self.trained if self.trained else 1.0

    def spent(self) -> dict[str, float]:
        """Seconds by phase, of all layers."""
        total: Counter[str] = Counter()
        for layer in self:
            total.update(layer.seconds)
        return dict(total)


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
        trained=sum(p.numel() for p in own if p.requires_grad),
        shared_with=tuple(use.name for use in block.uses[1:]),
        updates=block.updates,
        rows=block.rows,
        steps=block.steps,
        clipped=block.clipped,
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
    total, trained = sum(p.numel() for p in own), sum(p.numel() for p in own if p.requires_grad)
    return LayerReport(name, left.kind, covered=False, reason=left.reason, parameters=total, trained=trained)


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

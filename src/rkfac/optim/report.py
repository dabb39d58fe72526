"""What an optimizer knows about itself, as records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rkfac import compat
from rkfac.curvature.block import Block, Group
from rkfac.optim.coverage import LeftOut
from rkfac.optim.report_text import listed, summary, table

OUTSIDE = "not among the optimizer's parameters"
REPLACED = (
    "the model does not hold its weight any more: it was replaced or parametrized after the optimizer was built, and nothing "
    "moves what took its place unless a group holds that; build a new optimizer"
)
NUMBERS = (
    *("factor_every", "inverse_every", "factor_decay", "rank", "damping", "lr"),
    *("update_clip", "kl_clip", "fallback_scale"),
)  # of a parameter group


@dataclass(frozen=True)
class LayerReport:
    """One layer: how it is preconditioned, or why it is not. Inputs are the A side, outputs the G (Gamma) side."""

    name: str
    kind: str
    covered: bool
    reason: str = ""
    parameters: int = 0
    trained: int = 0  # of these parameters: they require gradients, and a group of the optimizer holds them
    frozen: int = 0  # of these: they require no gradients
    outside: int = 0  # of these: no group of the optimizer holds them, and it never moves them
    replaced: bool = False  # the model holds something else in the place of what the optimizer knows
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
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # numbers of its own parameter group that mean something to it


class Report(list[LayerReport]):
    """One record a layer; printed, a table and a few lines about all of them.

    `steps` were taken, `taken` of them by this object (a state that was loaded brings the others); `seconds` passed from its
    first statistic to the end of its last step, whatever else was done in them; `settings` are those of all layers and the
    first group's; `fallback` trains what is not covered; the last updates of `refused` layers were not finite; `outside`
    are sizes of the model's parameters that require gradients and that no group holds.
    """

    def __init__(
        self,
        layers: Iterable[LayerReport] = (),
        steps: int = 0,
        seconds: float = 0.0,
        fallback: str = "sgd",
        settings: Mapping[str, Any] | None = None,
        refused: tuple[str, ...] = (),
        outside: Mapping[str, int] | None = None,
        taken: int | None = None,
    ) -> None:
        super().__init__(layers)
        self.steps, self.seconds, self.fallback = steps, seconds, fallback
        self.settings, self.refused, self.outside = dict(settings or {}), refused, dict(outside or {})
        self.taken = steps if taken is None else taken

    def __str__(self) -> str:
        return "\n".join([*table(self), *summary(self)])

    __repr__ = __str__

    @property
    def trained(self) -> int:
        """Parameters that the optimizer trains, covered or not."""
        return sum(layer.trained for layer in self)

    @property
    def covered_share(self) -> float:
        """Of the trained parameters, whether or not they have curvature yet; 1 where there are none."""
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


class Factors(NamedTuple):
    """A layer's two running factors as they are now, whole symmetric matrices in float64."""

    input: Tensor
    output: Tensor


class Members(NamedTuple):
    """Whose a parameter is, by its identity: `held` by a group, `present` in the model (None: nobody asks)."""

    held: Collection[int]
    present: Collection[int] | None = None

    def has(self, p: nn.Parameter) -> bool:
        """Whether the model holds it."""
        return self.present is None or id(p) in self.present

    def counts(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """How many there are, and how many of them are trained, frozen and outside of all groups."""
        own = [p for p in parameters if not isinstance(p, UninitializedParameter)]
        held = [p for p in own if id(p) in self.held]
        return {
            "parameters": _size(own),
            "trained": _size(p for p in held if p.requires_grad),
            "frozen": _size(p for p in own if not p.requires_grad),
            "outside": _size(p for p in own if id(p) not in self.held),
        }


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def covered_layer(
    block: Block, group: Group, members: Members, in_place: Callable[[Block], Iterable[nn.Parameter]]
) -> LayerReport:
    """A layer with a block as it stands: preconditioned, or why not at the moment; `in_place`: what a replaced one has now."""
    reason, covered, replaced = "", True, not members.has(block.weight)
    if replaced:
        reason, covered = REPLACED, False
    elif id(block.weight) not in members.held:
        reason, covered = OUTSIDE, False
    elif block.retired:
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
    own = in_place(block) if replaced else block.parameters if covered else block.owned
    facts = block.facts(group)
    settings = numbers_of(group)
    if not block.settings.decomposition.reads_rank and "online" not in (
        facts.get("kept_input"),
        facts.get("kept_output"),
    ):
        settings.pop("rank", None)
    return LayerReport(
        name=block.name,
        kind=compat.kind_of(block.module).__name__,
        covered=covered,
        reason=reason,
        **members.counts(own),
        replaced=replaced,
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
        settings=settings,
        **facts,
    )


def numbers_of(group: Group) -> dict[str, Any]:
    """What a remark may look at."""
    return {name: group[name] for name in NUMBERS if name in group}


def uncovered_layer(name: str, left: LeftOut, members: Members, group: Group) -> LayerReport:
    """A layer, or a parameter of one, without a block, and why: it trains by the fallback rule if a group holds it."""
    own = [p for p in left.parameters if members.has(p)]
    replaced = bool(left.parameters) and not own
    counts = members.counts(own)
    reason = REPLACED if replaced else left.reason
    if counts["outside"] and counts["outside"] == counts["parameters"] and OUTSIDE not in reason:
        reason = f"{OUTSIDE}; {reason}"
    return LayerReport(
        name, left.kind, covered=False, reason=reason, replaced=replaced, settings=numbers_of(group), **counts
    )


def spectra(blocks: Mapping[str, Block], name: str) -> Spectra:
    """Exact eigenvalues of a layer's running factors."""
    return Spectra(*_two_sided(blocks, name).spectra())


def factors(blocks: Mapping[str, Block], name: str) -> Factors:
    """Copies of a layer's running factors."""
    return Factors(*(factor.dense() for factor in _two_sided(blocks, name).factors.values()))


def _two_sided(blocks: Mapping[str, Block], name: str) -> Block:
    known = {n: b for n, b in blocks.items() if len(b.factors) == 2}
    if name not in known:
        raise ValueError(f"no preconditioned layer is called {name!r}; there are {listed(known)}")
    return known[name]


def described(blocks: Iterable[Block], held: Collection[int]) -> str:
    """How many layers of which kind, and how many parameters of the optimizer's they hold."""
    blocks = list(blocks)
    counts = Counter(block.kind for block in blocks)
    kinds = " and ".join(f"{count} {kind} layers" for kind, count in counts.items()) or "no layers"
    return f"{kinds} hold {_size(p for block in blocks for p in block.parameters if id(p) in held):,}"

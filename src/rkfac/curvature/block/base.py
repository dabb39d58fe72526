"""One layer's curvature: what every kind of block has in common."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import Factor, Refreshed
from rkfac.curvature.following import Follower, Origin
from rkfac.curvature.moment import Moment
from rkfac.curvature.pace import Pace, Snapshot
from rkfac.curvature.passed import Passed
from rkfac.curvature.randomness import subset
from rkfac.curvature.statistics import Statistics
from rkfac.curvature.stopwatch import Stopwatch
from rkfac.layers.base import Adapter, Use
from rkfac.linalg import DecompositionError, Number, Rowwise

BRIEF = 4  # a brief statistic has a fourth of the rows
Made = Sequence[Refreshed[Any]] | DecompositionError | None

LEAST_SAMPLES = 16  # that a call adds though they have more rows than `rows`: half a sample tells nothing


class Block(ABC):
    """Statistics in, preconditioned gradient out, for one weight and, where one module alone has it, its bias."""

    kind: ClassVar[str]  # what a person calls it
    positions_summed: ClassVar[bool] = False  # whether a row is a whole sample already
    period: ClassVar[str] = "factor_every"  # the group's number that says how often it collects statistics

    pending: Statistics

    def __init__(self, uses: Sequence[Use], adapter: Adapter, settings: Settings) -> None:
        """`uses` are all modules that own the weight, `adapter` is what serves them together, as one of the first's."""
        self.uses: Sequence[Use] = tuple(uses)
        self.name, self.module = uses[0].name, uses[0].module
        self.weight = uses[0].weight  # the parameter whose group governs this block
        self.settings = settings
        self.wanted = True
        self.brief = False  # whether the coming statistic is one of many at the start, for which fewer rows do
        self.retired = ""  # why it is not preconditioned any more
        self.missed = 0  # steps in a row in which statistics were wanted, a gradient came, and no call was seen
        self.failures = 0  # refreshes in a row that failed
        self.penalised = False  # whether its gradient holds more than its calls explain, as a penalty in the loss
        self.rows = 0  # that the layer's gradient was the sum of at the last statistics
        self.alone = True  # whether .grad is the sum of what this process has seen
        self.clip: Number | None = None
        self.steps = 0  # that were preconditioned
        self._clipped: Number = 0
        self._stopwatch = Stopwatch(("statistics", "refresh", "apply"))
        self.version = 0  # of the basis: what is derived from it belongs to one version and one damping
        self._adapter = adapter
        self.reset()

    # --- the layer

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters it preconditions together: weight (or scale), then bias (or shift) if it is trained."""
        bias = self._adapter.bias(self.module)
        return (self.weight, bias) if self.bias and bias is not None else (self.weight,)

    @property
    def owned(self) -> tuple[nn.Parameter, ...]:
        """The same, trained or not."""
        bias = None if self.tied else self._adapter.bias(self.module)
        return (self.weight,) if bias is None else (self.weight, bias)

    @property
    def tied(self) -> bool:
        """Whether several modules own the weight: then nobody's bias takes part."""
        return len(self.uses) > 1

    def _has_bias(self) -> bool:
        return not self.tied and self._adapter.has_bias(self.module)

    @property
    def trouble(self) -> str:
        """Why the layer cannot be preconditioned any more, or an empty string."""
        if any(use.adapter.plain_weight(use.module) is not self.weight for use in self.uses):
            return "its weight was replaced, pruned or parametrized after the optimizer was built: build a new one"
        return ""

    @property
    def factors(self) -> Mapping[str, Factor[Any]]:
        """Its running factors by side; a block without any says itself what the next properties and `blend` say of them."""
        return {}

    def widest(self, group: Group) -> int:
        """Width of the widest matrix that it may come to form for a factor; 0: none."""
        return max((factor.shape[-1] for factor in self.factors.values() if factor.square), default=0)

    @property
    def ready(self) -> bool:
        """Whether it has a basis to precondition with."""
        return all(factor.ready for factor in self.factors.values())

    @property
    def updates(self) -> int:
        """How many statistics came in."""
        return min(factor.updates for factor in self.factors.values())

    @property
    def observed(self) -> bool:
        """Whether any statistic ever came in."""
        return self.updates > 0

    @property
    def refresh_cost(self) -> float:
        """Of a refresh beside those of other layers, for taking turns."""
        return float(sum(factor.refresh_cost for factor in self.factors.values()))

    def reset(self) -> None:
        """Forget everything: at the start, and when the set of trained parameters changes."""
        self.bias = self._has_bias()
        self.pace = None if self.settings.stale is None else Pace(self.settings.stale)
        self.passed = Passed()
        self._make()
        self.discard()

    def conform(self) -> None:
        """Begin anew where a bias was frozen or unfrozen: the curvature has another shape now."""
        if self._has_bias() != self.bias:
            self.reset()

    @abstractmethod
    def _make(self) -> None:
        """Factors that know nothing yet, for the parameters that are trained now."""

    def _follow(self) -> None:
        """Go where the model went."""
        for factor in self.factors.values():
            factor.to(self.weight.device)

    # --- statistics

    def explains(self, calls: Sequence[tuple[Use, Tensor, Tensor]], gradient: Tensor, weight: Tensor) -> bool | None:
        """Whether the layer's calls (input, output gradient) are where its weight's gradient comes from.

        None when a gradient of zero or one that is not finite cannot tell. A weight that is also used by hand, as in
        F.linear(h, embedding.weight), has gradients that no call of the layer accounts for.
        """
        with torch.no_grad():
            parts = (use.adapter.gradient(use.module, x, g) for use, x, g in calls)
            found = sum(parts, torch.zeros_like(gradient))
            size = torch.linalg.vector_norm(gradient.double())
            rest, weight = (gradient - found).double(), weight.double()
            self.penalised = not bool(torch.linalg.vector_norm(rest) <= 1e-2 * size)
            # A multiple of the weight is a penalty in the loss, of which a branch that starts at zero has little else.
            rest = rest - (rest * weight).sum() / weight.square().sum().clamp_min(1e-300) * weight
            difference = float(torch.linalg.vector_norm(rest) / size)
            seen = bool(found.any())  # a branch that starts at zero has only its penalty's gradient at first
        telling = math.isfinite(difference) and seen and float(size) > 1e-30  # below, float32 has few digits left
        return difference < 0.3 if telling else None

    def terms(self, use: Use, x: Tensor, g: Tensor) -> int:
        """How many terms a loss has that is reached from this layer's output directly: samples, or rows."""
        samples = use.adapter.samples(use.module, x)
        if samples is None and self.settings.weight_sharing == "reduce":
            samples = g.shape[0] if g.ndim > 1 else 1
        return use.adapter.positions(use.module, g) if samples is None else samples

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Collect the statistics of one call of the layer; `terms` is what the loss of the pass averages over."""
        if g.numel() == 0:
            return  # an expert no token was sent to
        with self.timed("statistics"), torch.no_grad():
            self.conform()
            self.pending.count(use, one_pass, terms, self.collect(use, x, g), use.adapter.positions(use.module, g))

    @abstractmethod
    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Add one call's rows, or some drawn in their place, to the pending moments; returns how many the call has."""

    def draw(
        self, count: int, device: torch.device, positions: int = 1, what: str = "rows"
    ) -> tuple[Tensor | None, float]:
        """Which of a call's rows, or samples of so many positions, are collected (None: all), and how many each stands for."""
        if self.settings.rows is None:
            return None, 1.0
        most = max(1, self.settings.rows // BRIEF) if self.brief else self.settings.rows
        most = most if positions == 1 else max(LEAST_SAMPLES, most // positions)
        if count <= most:
            return None, 1.0
        # Named by what a saved state knows, so that a resumed run draws the same.
        generator = self.settings.randomness.local(what, self.name, self.updates, self.pending.calls)
        return subset(count, most, generator).to(device), count / most

    def statistics(self) -> Statistics:
        """Empty ones, whose moments are one a factor, in the order of `factors`."""
        return Statistics(tuple(factor.moment() for factor in self.factors.values()))

    @property
    def addable(self) -> bool:
        """Whether what is pending adds up over processes."""
        return True

    def summands(self) -> list[tuple[Factor[Any], Moment]]:
        """What is pending as sums that add up over processes, each with the factor whose layout it has."""
        return [
            (factor, moment)
            for factor, moment in zip(self.factors.values(), self.pending.moments, strict=True)
            if factor.learns
        ]

    def beside(self) -> list[Tensor]:
        """Sums of its own that add up over processes, zeros where nothing came in; their shapes are everybody's."""
        return []

    def pooled_beside(self, totals: Sequence[Tensor]) -> None:  # noqa: B027 - most have none
        """Go over to those of all processes."""

    @property
    def ownable(self) -> tuple[str, ...]:
        """Sides whose averages may be in one process alone, for all that is asked of them elsewhere is their decomposition."""
        return ()

    def discard(self) -> None:
        """Drop what is pending."""
        self.pending = self.statistics()

    def commit(self, group: Group, numbers: list[float], loss_scale: float) -> bool:
        """Blend the pending statistics into the running averages; False, and no change, if they are not finite.

        `numbers` are what `pending.readings()` were on the device.
        """
        with self.timed("statistics"):
            pending, settings = self.pending, self.settings
            self._follow()
            finite = pending.settle(
                numbers, settings.loss_average, settings.sampled, loss_scale, summed=self.positions_summed
            )
            if finite:
                self.rows = pending.tokens
                self.blend(group)
                if self.pace is not None:
                    self.pace.took()
            self.discard()
            return finite

    def blend(self, group: Group) -> None:
        """The pending moments, which are settled and finite, enter the running averages."""
        decay = self.decay(group)
        for factor, moment in zip(self.factors.values(), self.pending.moments, strict=True):
            factor.take(moment, decay)

    def decay(self, group: Group) -> float:
        """What is left of the averages when this step's statistics come in."""
        decay = float(group["factor_decay"])
        return decay if self.pace is None else self.pace.decay(decay, group["factor_every"])

    # --- basis

    def asks(self, due: bool) -> bool:
        """Whether a refresh is wanted now: when one is due, and at once for a first basis."""
        return due or (not self.ready and self.failures == 0)

    def asked(self, group: Group) -> list[tuple[Factor[Any], Request]]:
        """The part of a refresh that is worth leaving to another process; nothing: all of it is done here."""
        return []

    def refresh(self, group: Group, made: Made = None) -> None:
        """Decompose the running averages anew; a failure keeps the old basis, a row of failures is an error.

        `made`: what was `asked` for, if somebody has done it, or why it failed there.
        """
        with self.timed("refresh"):
            try:
                self._follow()
                if isinstance(made, DecompositionError):
                    raise made
                self.decompose(group, made)
            except DecompositionError as error:
                self.failures += 1
                if self.pace is not None:
                    self.pace.news = False  # the same again would fail again
                if self.failures >= self.settings.max_failures:
                    raise RuntimeError(
                        f"layer {self.name!r} could not be decomposed {self.failures} times in a row ({error}). Model and "
                        "optimizer are intact: save them, then raise the damping, lower the learning rate or exclude it."
                    ) from error
                kept = "its previous basis is kept" if self.ready else "it takes plain steps meanwhile"
                warnings.warn(f"layer {self.name!r}: decomposition failed ({error}); {kept}", stacklevel=7)
                return
            if self.pace is not None:
                self.pace.looked(self.snapshot(), self.distance)
        self.failures = 0
        self.version += 1

    @abstractmethod
    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """The expensive part of `refresh`, or the use of what was `made` elsewhere; changes nothing when it raises."""

    # --- how much it changed

    comparable: ClassVar[bool] = True  # whether snapshots of it can be compared, which stale= needs

    def snapshot(self) -> Snapshot:
        """Its curvature as it is now, in values that are never changed: the decompositions in use."""
        return tuple(factor.snapshot() for factor in self.factors.values())

    def distance(self, now: Snapshot, then: Snapshot) -> float:
        """||X - Y||_F / ||Y||_F of the factor that changed most."""
        factors = zip(self.factors.values(), now, then, strict=True)
        return max(factor.distance(new, old) for factor, new, old in factors)

    def _packed(self, snapshot: Snapshot) -> Any:
        """A snapshot as tensors, numbers and strings."""
        factors = self.factors.items()
        return {side: factor.packed(kept) for (side, factor), kept in zip(factors, snapshot, strict=True)}

    def _unpacked(self, saved: Any) -> Snapshot:
        """And back, refusing what does not fit."""
        if saved.keys() != self.factors.keys():
            raise ValueError(f"a saved snapshot has factors {list(saved)}, this model {list(self.factors)}")
        return tuple(factor.unpacked(saved[side]) for side, factor in self.factors.items())

    # --- step

    def begin(self) -> None:  # noqa: B027 - most have nothing to forget
        """A step begins: what belonged to the last one alone is over."""

    learns = False  # whether it wants to see the gradients of every step

    def learn(self, gradients: tuple[Tensor, ...], group: Group) -> None:
        """See the gradients of a step that is about to be taken, one a parameter, before its direction is asked for."""
        raise NotImplementedError(f"a {self.kind} block learns from statistics alone")

    @abstractmethod
    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """The preconditioned gradient, given one tensor a parameter; `spend`: the weight's may be overwritten.

        `origin`: what these are of the gradients of this step and of their momentum, where they are no more than that.
        """

    @abstractmethod
    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """The damped curvature under the block's own approximation, times a change of the parameters."""

    def curved(
        self, direction: Direction, vectors: Sequence[Tensor], group: Group
    ) -> tuple[float, tuple[Tensor, ...] | None]:
        """The damped curvature times a direction just made from these vectors: a share of them, or of tensors.

        Natural gradients are the inverse of just that.
        """
        return 1.0, None

    @property
    def shows_rows(self) -> bool:
        """Whether inputs and outputs of its layer are the rows that its gradient is the sum of: only then hooks look there."""
        return False

    follower: Follower | None = None  # of the rows of its coming gradients, for blocks that know how

    # --- natural gradients in the backward pass, for blocks that know how

    def spent(self, phase: str, seconds: float) -> None:
        """Its part of work that was done for several blocks at once."""
        self._stopwatch.add(phase, seconds)

    rowwise: Rowwise | None = None  # what the coming gradients are preconditioned by, row by row, on their way
    natural = False  # whether .grad got natural gradients since the last step
    _held: Callable[[], Tensor | None] | None = None  # the .grad that was natural in the last one

    def pinned(self, group: Group) -> Rowwise | None:
        """What rows are to be preconditioned by under the present basis and damping; the same object while these stay."""
        return None

    def carry(self, tensors: Sequence[Tensor | None], before: Rowwise | None, after: Rowwise | None) -> None:
        """Bring preconditioned tensors, one a parameter, from one preconditioner to another, in place."""
        assert before is after is None, f"a {self.kind} block preconditions no rows"

    def bring(self, before: Rowwise | None, after: Rowwise | None) -> None:
        """Bring .grad from one preconditioner to another (None: plain), in place."""
        self.carry([p.grad for p in self.parameters], before, after)

    @property
    def arrived_natural(self) -> bool:
        """Whether .grad holds natural gradients: of this step's backward passes, or of the last step and not dropped since.

        Others came another way than through the layer (a compiled graph, or by hand).
        """
        gradient = self.weight.grad
        return self.natural or (gradient is not None and self._held is not None and self._held() is gradient)

    def let_go(self) -> None:
        """The gradients are gone."""
        self.natural, self._held = False, None
        self.passed.drop()
        if self.follower is not None:
            self.follower.drop()

    def hold(self, rowwise: Rowwise | None) -> None:
        """The gradients that are there now are natural ones of this preconditioner (None: plain)."""
        gradient = self.weight.grad
        self.rowwise, self.natural = rowwise, False
        self.passed.drop()
        self._held = None if rowwise is None or gradient is None else weakref.ref(gradient)

    def stepped(self) -> None:
        """A step is about to be taken, of which `clip` is left; nothing waits for a device that knows it."""
        self.steps += 1
        if self.clip is not None:
            acted = (self.clip < 1) * (self.clip > 0)  # zero: the step was refused
            known = torch.as_tensor(self._clipped, device=acted.device) if isinstance(acted, Tensor) else self._clipped
            self._clipped = known + acted

    @property
    def clipped(self) -> int:
        """How many of `steps` a clip has shortened; waits for a GPU."""
        return int(self._clipped)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        return {
            "bias": self.bias,
            "retired": self.retired,
            "failures": self.failures,
            "version": self.version,
            "rows": self.rows,
            "pace": None if self.pace is None else self.pace.state_dict(self._packed),
            "factors": {side: factor.state_dict() for side, factor in self.factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved, onto the model's device."""
        self.reset()
        if state["bias"] != self.bias:
            raise ValueError("the saved state was made with another choice of trained biases")
        if state["factors"].keys() != self.factors.keys():
            raise ValueError(f"the saved state has factors {list(state['factors'])}, this model {list(self.factors)}")
        counts = state["failures"], state["version"], state["rows"]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
            raise ValueError("the saved state counts {!r} failures, {!r} refreshes and {!r} rows".format(*counts))
        if not isinstance(state["retired"], str):
            raise ValueError(f"the saved state was retired for {state['retired']!r}")
        for side, factor in self.factors.items():
            factor.load_state_dict(state["factors"][side])
        if (state["pace"] is None) != (self.pace is None):
            raise ValueError("the saved state has other intervals between statistics (stale=)")
        if self.pace is not None:
            self.pace.load_state_dict(state["pace"], self._unpacked)
        self.retired, self.missed = state["retired"], 0
        self.failures, self.version, self.rows = counts

    @abstractmethod
    def facts(self, group: Group) -> dict[str, Any]:
        """What `report()` tells of this block beyond what all have in common."""

    def spectra(self) -> tuple[Tensor, ...]:
        """Exact eigenvalues of the running factors, in the order of `factors`."""
        return tuple(factor.spectrum() for factor in self.factors.values())

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory of averages, of decompositions and of what these are compared with."""
        factors = self.factors.values()
        own = {"factors": sum(f.nbytes for f in factors), "basis": sum(f.basis_nbytes for f in factors)}
        if self.pace is not None:  # the younger snapshot is the basis in use
            kept = [t for old in self.pace.seen[1:] for side in self._packed(old).values() for t in side.values()]
            own["snapshots"] = sum(t.nbytes for t in kept if isinstance(t, Tensor))
        return own

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds spent in a phase."""
        return self._stopwatch.timed(phase, self.weight.device)

    @property
    def seconds(self) -> dict[str, float]:
        """Spent in each phase so far; waits for a GPU."""
        return self._stopwatch.seconds()

    @property
    def began(self) -> float | None:
        """When it was first at work, by the host's clock."""
        return self._stopwatch.began

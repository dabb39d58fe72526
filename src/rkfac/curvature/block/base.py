"""One layer's curvature: what every kind of block has in common."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rkfac.curvature.block.direction import Direction
from rkfac.curvature.damping import Damping
from rkfac.curvature.decompose import Decomposition, Request
from rkfac.curvature.factor import Factor, Start
from rkfac.curvature.following import Follower, Origin
from rkfac.curvature.randomness import Randomness, subset
from rkfac.curvature.statistics import Statistics
from rkfac.curvature.stopwatch import Stopwatch
from rkfac.layers.base import Adapter, Use
from rkfac.linalg import DecompositionError, Rowwise

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is fixed for the life of an optimizer; everything that may change sits in its parameter groups."""

    decomposition: Decomposition
    damping: Damping
    tail: str
    warm_start: bool
    weight_sharing: str
    rows: int | None
    loss_average: str
    sampled: bool
    start: Start
    eager_start: bool
    backward: bool
    stagger: bool
    max_failures: int
    randomness: Randomness
    sides: str = "both"  # which factors a layer keeps; the identity stands for the other
    method: Any = None  # what the block of a particular optimizer is told beyond this: a small frozen value

    def due(self, step: int, period: int, offset: int = 0) -> bool:
        """Whether a period is over; with `eager_start` also when half of the age has passed, while that is shorter.

        The periods of a layer end at `offset`, when the layers take turns; while young all are due together.
        """
        return step % period == offset or (self.eager_start and step // 2 < period and _young(step))

    def request(
        self, group: Group, layer: str, side: str, number: int, damping: tuple[float, bool], affordable: int | None
    ) -> Request:
        """What a decomposition is asked for under a group's present settings; `number` counts the refreshes."""
        return Request(
            strategy=self.decomposition,
            name=f"the {side} factor of {layer!r}",
            rank=group["rank"],
            oversampling=group["oversampling"],
            power_iterations=group["power_iterations"],
            tail=self.tail,
            warm_start=self.warm_start,
            damping=damping[0],
            relative=damping[1],
            affordable=affordable,
            power=self.damping.power,
            generator=self.randomness.generator("sketch", layer, side, number),
        )


def _young(step: int) -> bool:
    """Whether a step is one of 0, 1, 2, 3, 4, 6, 9, 13, 19, 28, 42...: each half as old again as the one before."""
    at = 0
    while at < step:
        at += max(1, at // 2)
    return at == step


class Block(ABC):
    """Statistics in, preconditioned gradient out, for one weight and, where one module alone has it, its bias."""

    kind: ClassVar[str]  # what a person calls it
    positions_summed: ClassVar[bool] = False  # whether a row is a whole sample already

    pending: Statistics

    def __init__(self, uses: Sequence[Use], adapter: Adapter, settings: Settings) -> None:
        """`uses` are all modules that own the weight, `adapter` is what serves them together, as one of the first's."""
        self.uses: Sequence[Use] = tuple(uses)
        self.name, self.module = uses[0].name, uses[0].module
        self.weight = uses[0].weight  # the parameter whose group governs this block
        self.settings = settings
        self.wanted = True
        self.retired = ""  # why it is not preconditioned any more
        self.missed = 0  # steps in a row in which statistics were wanted, a gradient came, and no call was seen
        self.failures = 0  # refreshes in a row that failed
        self.penalised = False  # whether its gradient holds more than its calls explain, as a penalty in the loss
        self.rows = 0  # that the layer's gradient was the sum of at the last statistics
        self.clip: Tensor | None = None
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

    @abstractmethod
    def width(self, use: Use) -> int:
        """Entries of the layer's output at one position."""

    @property
    @abstractmethod
    def factors(self) -> Mapping[str, Factor[Any]]:
        """Its running factors by side."""

    @property
    def ready(self) -> bool:
        """Whether it has a basis to precondition with."""
        return all(factor.ready for factor in self.factors.values())

    @property
    def observed(self) -> bool:
        """Whether any statistic ever came in."""
        return all(factor.updates > 0 for factor in self.factors.values())

    def reset(self) -> None:
        """Forget everything: at the start, and when the set of trained parameters changes."""
        self.bias = self._has_bias()
        self._make()
        self.discard()

    @abstractmethod
    def _make(self) -> None:
        """Factors that know nothing yet, for the parameters that are trained now."""

    def _follow(self) -> None:
        """Go where the model went."""
        for factor in self.factors.values():
            factor.to(self.weight.device)

    # --- statistics

    def explains(self, calls: Sequence[tuple[Use, Tensor, Tensor]], gradient: Tensor) -> bool | None:
        """Whether the layer's calls (input, output gradient) are where its weight's gradient comes from.

        None when a gradient of zero or one that is not finite cannot tell. A weight that is also used by hand, as in
        F.linear(h, embedding.weight), has gradients that no call of the layer accounts for.
        """
        with torch.no_grad():
            parts = (use.adapter.gradient(use.module, x, g) for use, x, g in calls)
            found = sum(parts, torch.zeros_like(gradient))
            size = torch.linalg.vector_norm(gradient.double())
            rest, weight = (gradient - found).double(), self.weight.double()
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
        return g.numel() // self.width(use) if samples is None else samples

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Collect the statistics of one call of the layer; `terms` is what the loss of the pass averages over."""
        if g.numel() == 0:
            return  # an expert no token was sent to
        with self.timed("statistics"), torch.no_grad():
            if self._has_bias() != self.bias:
                self.reset()  # a bias was frozen or unfrozen: the curvature has another shape now
            self.pending.count(use, one_pass, terms, self.collect(use, x, g), g.numel() // self.width(use))

    @abstractmethod
    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Add one call's rows, or some drawn in their place, to the pending moments; returns how many the call has."""

    def draw(self, rows: int, device: torch.device) -> tuple[Tensor | None, float]:
        """Which of a call's rows are collected (None: all), and how many each of them stands for."""
        most = self.settings.rows
        if most is None or rows <= most:
            return None, 1.0
        # Named by what a saved state knows, so that a resumed run draws the same.
        updates = next(iter(self.factors.values())).updates
        generator = self.settings.randomness.generator("rows", self.name, updates, self.pending.calls)
        return subset(rows, most, generator).to(device), rows / most

    def statistics(self) -> Statistics:
        """Empty ones, whose moments are one a factor, in the order of `factors`."""
        return Statistics(tuple(factor.moment() for factor in self.factors.values()))

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
                for factor, moment in zip(self.factors.values(), pending.moments, strict=True):
                    factor.take(moment, group["factor_decay"])
            self.discard()
            return finite

    # --- basis

    def refresh(self, group: Group) -> None:
        """Decompose the running averages anew; a failure keeps the old basis, a row of failures is an error."""
        with self.timed("refresh"):
            try:
                self._follow()
                self.decompose(group)
            except DecompositionError as error:
                self.failures += 1
                if self.failures >= self.settings.max_failures:
                    raise RuntimeError(
                        f"layer {self.name!r} could not be decomposed {self.failures} times in a row ({error}). Model and "
                        "optimizer are intact: save them, then raise the damping, lower the learning rate or exclude it."
                    ) from error
                kept = "its previous basis is kept" if self.ready else "it takes plain steps meanwhile"
                warnings.warn(f"layer {self.name!r}: decomposition failed ({error}); {kept}", stacklevel=6)
                return
        self.failures = 0
        self.version += 1

    @abstractmethod
    def decompose(self, group: Group) -> None:
        """The expensive part of `refresh`; changes nothing when it raises."""

    # --- step

    learns: ClassVar[bool] = False  # whether it wants to see the gradients of every step

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

    @property
    def shows_rows(self) -> bool:
        """Whether inputs and outputs of its layer are the rows that its gradient is the sum of: only then hooks look there."""
        return False

    follower: Follower | None = None  # of the rows of its coming gradients, for blocks that know how

    # --- natural gradients in the backward pass, for blocks that know how

    rowwise: Rowwise | None = None  # what the coming gradients are preconditioned by, row by row, on their way
    natural = False  # whether .grad got natural gradients since the last step
    _held: Callable[[], Tensor | None] | None = None  # the .grad that was natural in the last one

    def pinned(self, group: Group) -> Rowwise | None:
        """What rows are to be preconditioned by under the present basis and damping; the same object while these stay."""
        return None

    def carry(self, tensors: Sequence[Tensor | None], before: Rowwise | None, after: Rowwise | None) -> None:
        """Bring preconditioned tensors, one a parameter, from one preconditioner to another, in place."""
        assert before is after is None, f"a {self.kind} block preconditions no rows"

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
        if self.follower is not None:
            self.follower.drop()

    def hold(self, rowwise: Rowwise | None) -> None:
        """The gradients that are there now are natural ones of this preconditioner (None: plain)."""
        gradient = self.weight.grad
        self.rowwise, self.natural = rowwise, False
        self._held = None if rowwise is None or gradient is None else weakref.ref(gradient)

    # --- memory

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        return {
            "bias": self.bias,
            "retired": self.retired,
            "failures": self.failures,
            "version": self.version,
            "rows": self.rows,
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
        """Memory of averages and of decompositions."""
        factors = self.factors.values()
        return {"factors": sum(f.nbytes for f in factors), "basis": sum(f.basis_nbytes for f in factors)}

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds spent in a phase."""
        return self._stopwatch.timed(phase, self.weight.device)

    @property
    def seconds(self) -> dict[str, float]:
        """Spent in each phase so far; waits for a GPU."""
        return self._stopwatch.seconds()

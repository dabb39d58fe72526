"""What a capture knows of a step: forwards, calls of layers, gradients that arrived, and who watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from rkfac import compat
from rkfac.layers.base import Use


class Observer(Protocol):
    """Who receives a layer's statistics."""

    name: str
    uses: Sequence[Use]  # of its weight
    weight: nn.Parameter
    wanted: bool
    natural: bool  # whether its gradient comes preconditioned

    @property
    def trouble(self) -> str:
        """Why the layer cannot be preconditioned any more, or an empty string."""

    def terms(self, use: Use, x: Tensor, g: Tensor) -> int:
        """How many terms a loss has that is reached from the layer's output directly."""

    def observe(self, use: Use, x: Tensor, g: Tensor, one_pass: Any, terms: int) -> None:
        """Input and output gradient of one call of the layer that counts."""

    def explains(self, calls: list[tuple[Use, Tensor, Tensor]], gradient: Tensor, weight: Tensor) -> bool | None:
        """Whether these calls are where the weight's gradient comes from."""

    def discard(self) -> None:
        """Drop what was observed."""


class Dependant(Protocol):
    """Who keeps something for gradients that may be dropped."""

    def drop(self) -> None:
        """They are gone."""


@dataclass(eq=False)
class Pass:
    """One forward of the model: calls of a layer within it are positions, calls in another are more samples.

    `terms` is what the loss averages over: how many targets were drawn, or, since nobody tells, the samples in the layer
    that the backward pass reaches first. The order of the model's arguments and of their dimensions has no say in it.
    `tokens` is how many there are in the largest call that has a dimension for them, 0 if none has: a layer that is called
    on all of them more than once has no more, one that is called on parts of them, or step by step, has as many as its calls.
    `told` is either, where somebody does tell.
    """

    differentiated: bool = False
    terms: int | None = None
    tokens: int = 0
    told: int | None = None

    def holds(self, use: Use, g: Tensor) -> None:
        """A call of it with such a gradient at its output."""
        if g.ndim > 2:
            self.tokens = max(self.tokens, use.adapter.positions(use.module, g))

    def bounded(self, tokens: int) -> int:
        """How many tokens a layer has seen whose calls have so many."""
        return self.told or min(tokens, self.tokens or tokens)


@dataclass(eq=False)
class Call:
    """One call of a layer: its input, and the place it has in a forward."""

    one_pass: Pass
    use: Use
    x: Tensor
    laid_out: Callable[[Tensor], Tensor]  # a gradient that arrives, as one at the layer's output
    drawn: Tensor | None = None  # gradient of a sampled target
    backwards: int = 0


@dataclass(eq=False)
class Arrival:
    """A gradient at a call's output; backward passes may be nested, so each has arrivals of its own."""

    call: Call
    task: int
    gradient: Tensor


@dataclass(eq=False)
class Watched:
    """A layer under observation, and what is known of it since the last step."""

    observer: Observer
    arrived: list[Arrival] = field(default_factory=list)  # gradients that may or may not reach the weight
    counted: tuple[Tensor, int] | None = None  # the .grad its statistics belong to, and its version
    leaf: Tensor | None = None  # what gradients reach and hooks are on: the weight, or what stands in its place
    shard: Any = None  # fully_shard's record of the leaf, where that stands in a sharded weight's place
    verified: bool = False
    foreign: str = ""  # why it must not be preconditioned after all
    doubled: bool = False  # a graph of gradients was built through it since the last step
    seen: bool = False  # its calls reached this capture since the last step


def dropped(counted: tuple[Tensor, int], gradient: Tensor | None) -> bool:
    """Whether a gradient that something was counted for was set to None, replaced or zeroed since."""
    known, version = counted
    if gradient is not known:
        # DistributedDataParallel may put a view of its bucket, with the average of all processes, in a gradient's place.
        in_a_bucket = gradient is not None and compat.base_of(gradient) is not gradient
        return not (in_a_bucket and gradient is not None and bool(gradient.any()))
    return compat.version_of(gradient) != version and not bool(gradient.any())  # scaled or clipped is not dropped

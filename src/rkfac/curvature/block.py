"""One layer's curvature: what every kind of block has in common."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rkfac.curvature.capture import Pass
from rkfac.curvature.decompose import Decomposition, Request
from rkfac.layers.base import Adapter
from rkfac.linalg import DecompositionError

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is fixed for the life of an optimizer; everything that may change sits in its parameter groups."""

    decomposition: Decomposition
    damping_rule: str
    relative_damping: bool
    tail: str
    warm_start: bool
    weight_sharing: str
    loss_average: str
    sampled: bool
    identity_start: bool
    max_failures: int
    generator: torch.Generator

    def request(self, group: Group, name: str) -> Request:
        """What a decomposition is asked for under a group's present settings."""
        return Request(
            rank=group["rank"],
            oversampling=group["oversampling"],
            power_iterations=group["power_iterations"],
            tail=self.tail,
            warm_start=self.warm_start,
            damping=group["damping"],
            relative=self.relative_damping,
            generator=self.generator,
            name=name,
        )


class LayerDirection(Protocol):
    """A layer's preconditioned gradient S, not necessarily formed."""

    @property
    def squared_norm(self) -> Tensor:
        """||S||^2."""

    @property
    def inner(self) -> Tensor:
        """<S, J>."""


@dataclass(frozen=True)
class DenseDirection:
    """S, one tensor a parameter."""

    parts: tuple[Tensor, ...]
    squared_norm: Tensor
    inner: Tensor


class Block(ABC):
    """Statistics in, preconditioned gradient out, for one module."""

    def __init__(self, name: str, module: nn.Module, adapter: Adapter, settings: Settings) -> None:
        self.name = name
        self.module = module
        self._adapter = adapter
        self.settings = settings
        self.wanted = True
        self.failures = 0
        self.clip: Tensor | None = None
        self.seconds = {"statistics": 0.0, "refresh": 0.0, "apply": 0.0}
        self.version = 0  # of the basis: cached inverses belong to one version and one damping
        self._passes: list[Pass] = []
        self._rows = 0
        self._tokens = 0

    @property
    def weight(self) -> nn.Parameter:
        """The parameter whose group governs this block."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters it preconditions together: weight (or scale), then bias (or shift) if it is trained."""
        bias = getattr(self.module, "bias", None)
        return (self.weight, bias) if self.bias and isinstance(bias, nn.Parameter) else (self.weight,)

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it has a basis to precondition with."""

    @property
    @abstractmethod
    def observed(self) -> bool:
        """Whether any statistic ever came in."""

    def observe(self, x: Tensor, g: Tensor, one_pass: Pass) -> None:
        """Collect the statistics of one call of the layer."""
        if g.numel() == 0 or torch._C._are_functorch_transforms_active():
            return  # an expert no token was sent to; somebody's vmap(grad(...)), which is no training step
        with self.timed("statistics"), torch.no_grad():
            self.adjust()  # first of all: it may drop what is pending
            if all(seen is not one_pass for seen in self._passes):
                self._passes.append(one_pass)
            self._rows += self.collect(x, g)
            self._tokens += g.numel() // self.width

    @property
    @abstractmethod
    def width(self) -> int:
        """Entries of the layer's output at one position."""

    def adjust(self) -> None:
        """Start anew if a bias was frozen or unfrozen: the curvature has another shape then."""
        if self._adapter.has_bias(self.module) != self.bias:
            self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, for the parameters that are trained now."""
        self.bias = self._adapter.has_bias(self.module)
        self.discard()

    @abstractmethod
    def collect(self, x: Tensor, g: Tensor) -> int:
        """Add one call's statistics to what is pending; returns how many rows they were."""

    @abstractmethod
    def pending_size(self) -> Tensor | None:
        """A number that is finite exactly when all pending statistics are; None when there are none."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what is pending."""
        self._passes.clear()
        self._rows = self._tokens = 0

    def scales(self, loss_scale: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
        """What turns the raw sums of a a^T and g g^T into factors, whatever the loss averaged over.

        With N samples and S positions a sample, A = sum a a^T / (N S^2) and G = S / N sum g^ g^^T, where g^ is the
        gradient of one sample's loss: N g for a loss averaged over the batch, g for a summed one. Their product is the
        KFC block; the split of S^2 between the two is the paper's.
        """
        samples = self.samples()
        positions = self._rows / samples
        return 1 / (samples * positions**2), self.gradient_scale(positions, loss_scale)

    def samples(self) -> int:
        """N: what the loss averages over."""
        if self.settings.loss_average == "tokens" and not self.settings.sampled:
            return self._tokens  # not rows: those of norms and of weight_sharing="reduce" are whole samples
        return sum(p.samples for p in self._passes) or self._rows

    def gradient_scale(self, positions: float, loss_scale: Tensor | None) -> Tensor | float:
        """positions / N sum g^ g^^T from the raw sum of g g^T, a gradient scaler's factor undone."""
        summed = self.settings.loss_average == "sum" or self.settings.sampled
        scale = positions / self.samples() if summed else positions * self.samples()
        if loss_scale is None or self.settings.sampled:
            return scale
        return scale / loss_scale.to(device=self.weight.device, dtype=torch.float32).square()

    @abstractmethod
    def commit(self, group: Group, loss_scale: Tensor | None) -> None:
        """Blend the pending statistics into the running averages."""

    def refresh(self, group: Group) -> None:
        """Decompose the running averages anew; a failure keeps the old basis, a row of failures is an error."""
        with self.timed("refresh"):
            try:
                self.decompose(group)
            except (DecompositionError, ValueError) as error:
                self.failures += 1
                if self.failures >= self.settings.max_failures:
                    raise RuntimeError(
                        f"layer {self.name!r} could not be decomposed {self.failures} times in a row ({error}). Model and "
                        "optimizer are intact: save them, then raise the damping, lower the learning rate or exclude it."
                    ) from error
                kept = "its previous basis is kept" if self.ready else "it trains by the fallback rule meanwhile"
                warnings.warn(f"layer {self.name!r}: decomposition failed ({error}); {kept}", stacklevel=2)
                return
        self.failures = 0
        self.version += 1

    @abstractmethod
    def decompose(self, group: Group) -> None:
        """The expensive part of `refresh`; changes nothing when it raises."""

    @abstractmethod
    def direction(self, group: Group) -> LayerDirection:
        """The preconditioned gradient of the parameters' present `.grad`."""

    @abstractmethod
    def add(self, direction: Any, index: int, target: Tensor, factor: Tensor | None, alpha: float) -> None:
        """target += alpha * factor * (the part of S that belongs to parameter `index`), in place."""

    @abstractmethod
    def curvature(self, change: tuple[Tensor, ...], group: Group) -> Tensor:
        """change^T (F + damping) change under the block's own approximation of F."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved."""

    @abstractmethod
    def facts(self, group: Group) -> dict[str, Any]:
        """What `report()` tells of this block."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the seconds spent in a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin


def relative_to(damping: float, largest: Tensor) -> Tensor:
    """damping * largest; 1 where nothing was seen yet, so that a dead layer keeps its plain gradient."""
    return torch.where(largest > 0, damping * largest, torch.ones_like(largest))


def add_part(part: Tensor, target: Tensor, factor: Tensor | None, alpha: float) -> None:
    """target += alpha * factor * part, in place, whatever the target's dtype."""
    if factor is not None:
        part = part * factor
    target.add_(part.to(target.dtype), alpha=alpha)

"""The contract of one running Kronecker factor, and the average all of them keep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.moment import Moment
from rkfac.linalg import Diagonal, LowRank

LOWEST_LEVEL = -400.0

Low = TypeVar("Low", LowRank, Diagonal)


@dataclass(frozen=True)
class Start:
    """Where an average begins: at the identity (the paper) or free of its start ("unbiased").

    `sketched`: the identity is part of what a sketch sees, as in the paper. Otherwise the average without it is
    decomposed and the identity, which every vector is an eigenvector of, is added to the eigenvalues afterwards.
    """

    identity: bool
    sketched: bool = False

    @property
    def weight(self) -> float:
        """What the past weighs before the first statistic."""
        return 1.0 if self.identity else 0.0


@dataclass(frozen=True)
class Dropped(Start):
    """At the identity, whose part is then left out: averages from zero that nothing corrects, too small while young."""

    identity: bool = False

    @property
    def weight(self) -> float:
        """As with the identity."""
        return 1.0


@dataclass(frozen=True, eq=False)
class Refreshed(Generic[Low]):
    """A finished decomposition in true units (float64 eigenvalues), the mean eigenvalue and the share of the trace kept."""

    low: Low
    mean: Tensor
    captured: Tensor


class Factor(ABC, Generic[Low]):
    """X <- decay X + (1 - decay) X_k, and the decomposition of it that is in use.

    The average is kept as 2^exponent * value + identity * I, where `value` starts at zero and has entries of about one,
    and `weight` is the weight the past carries: 1 from the identity on, and from 0 upwards otherwise, which divides out
    the start exactly, also when the decay changes on the way.
    """

    learns: ClassVar[bool] = True  # whether rows change it
    kind: ClassVar[str]  # a word for how it is kept
    square: bool = True  # whether it forms matrices as wide as the side

    def __init__(self, shape: tuple[int, ...], start: Start, like: Tensor) -> None:
        self.shape = shape
        self.start = start
        self._like = like
        self._value: Tensor | None = None  # made when the first statistic comes: layers that never train cost nothing
        self._level = -math.inf  # binary logarithm of about the largest entry
        self._weight, self._identity = start.weight, 1.0 if start.identity else 0.0
        self.updates = 0
        self._refreshed: Refreshed[Low] | None = None
        self._away: Tensor | None = None  # the value's trace in true units, where another process keeps the average
        self._lent: tuple[Tensor | None, float] | None = None  # the saved value and its level, while a state is made

    @property
    def dtype(self) -> torch.dtype:
        """Of the average."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._like.device

    def moment(self) -> Moment:
        """An empty moment of the kind that it takes."""
        return Moment()

    @abstractmethod
    def _zero(self) -> Tensor:
        """A value of zero."""

    @property
    def _present(self) -> Tensor:
        """The value, zero before the first statistic."""
        return self._zero() if self._value is None else self._value

    def _strips(self, value: Tensor) -> list[Tensor]:
        """A value in the pieces that a moment is blended into, as views."""
        return [value]

    @property
    def _exponent(self) -> int:
        return 0 if math.isinf(self._level) else math.ceil(self._level)

    def start_from(self, other: Factor[Low]) -> None:
        """Go on from another one's average, which then weighs as much as all of the past, and from its basis."""
        self._value = None if other._value is None else other._value.clone()
        self._level, self._identity, self._weight = other._level, other._identity, 1.0
        self.updates, self._refreshed = other.updates, other._refreshed

    def take(self, moment: Moment, decay: float) -> None:
        """One more statistic, in place."""
        if self._away is not None:
            keep, share = self._weights(decay)
            self._away = keep * self._away + share * moment.scale * moment.trace()
            return
        self._value = self._present
        keep, share = self._weights(decay)
        before, blank = self._exponent, math.isinf(self._level)
        self._level = max(
            self._level + math.log2(keep) if keep else -math.inf,
            moment.level + math.log2(share) if share else -math.inf,
        )
        if self._level < LOWEST_LEVEL:  # zero for every purpose, and its inverse would leave the range of float64
            self._level, blank = -math.inf, True
        rescaled = 0.0 if blank else keep * 2.0 ** (before - self._exponent)
        moment.blend_into(self._strips(self._value), rescaled, share, self._exponent)

    # --- with others

    def summed(self, moment: Moment, exponent: int) -> Tensor:
        """A moment, settled or not, as one tensor that adds up over processes, in units of 4^exponent; zeros if it is empty."""
        value = self._zero()
        moment.add_to(self._strips(value), exponent)
        return self._sent(value)

    @property
    def sum_shape(self) -> torch.Size:
        """Of that."""
        return torch.Size(self.shape)

    def pooled(self, moment: Moment, total: Tensor, exponent: int) -> None:
        """Let a moment stand for the sum over all processes."""
        moment.pooled(self._strips(self._received(total)), exponent)

    def _sent(self, value: Tensor) -> Tensor:
        """A value as other processes get it: nothing twice, and no more passes over it than one."""
        return value

    def _received(self, entries: Tensor) -> Tensor:
        """And back."""
        return entries

    @property
    def here(self) -> bool:
        """Whether the average is in this process, and not in another process."""
        return self._away is None

    def leave(self) -> None:
        """Let another process keep the average: here its trace and what is made of it are enough."""
        if self._away is None:
            self._away = self.trace() - self._identity * self.shape[-1]
            self._value = None

    def lend(self) -> tuple[Tensor | None, float]:
        """The average as it is saved, for a process that does not keep it."""
        return None if self._value is None else self._saved(self._value), self._level

    @property
    def saved_shape(self) -> torch.Size:
        """Of what is lent, and saved."""
        return torch.Size(self.shape)

    def borrow(self, lent: tuple[Tensor | None, float] | None) -> None:
        """What `state_dict` saves in the place of what is not here."""
        self._lent = lent

    def _weights(self, decay: float) -> tuple[float, float]:
        """Count a statistic: what the past and what is new weigh in the average from now on, one together."""
        past = decay * self._weight
        self._weight = past + (1 - decay)
        keep, share = past / self._weight, (1 - decay) / self._weight
        self._identity *= keep
        self.updates += 1
        return keep, share

    # --- the decomposition

    @property
    def ready(self) -> bool:
        """Whether there is a decomposition to use."""
        return self._refreshed is not None

    @property
    def low(self) -> Low:
        """The decomposition in use, eigenvalues in float64 and true units."""
        return self._in_use.low

    @property
    def mean(self) -> Tensor:
        """Mean eigenvalue when the decomposition was made, a number a group."""
        return self._in_use.mean

    @property
    def captured(self) -> Tensor | None:
        """Share of the trace the kept pairs held when they were made."""
        return None if self._refreshed is None else self._refreshed.captured

    @property
    def _in_use(self) -> Refreshed[Low]:
        if self._refreshed is None:
            raise RuntimeError("this factor was never refreshed")
        return self._refreshed

    @abstractmethod
    def refresh(self, request: Request) -> Refreshed[Low]:
        """Decompose the average anew; changes nothing. Raises DecompositionError when that fails."""

    def intact(self, request: Request) -> Refreshed[Any] | None:
        """The average as it is in a decomposition's place, where its damped inverse is all that is wanted; None: it is not."""
        return None

    @property
    @abstractmethod
    def refresh_cost(self) -> int:
        """About how many multiplications a refresh takes, by the factor's shape alone."""

    def adopt(self, refreshed: Refreshed[Low]) -> None:
        """Use a finished decomposition from now on."""
        self._refreshed = refreshed

    # --- how much it changed

    def snapshot(self) -> Refreshed[Low]:
        """The decomposition in use, as it stays when another one is adopted."""
        return self._in_use

    def distance(self, now: Refreshed[Low], then: Refreshed[Low]) -> float:
        """||X - Y||_F / ||Y||_F of two decompositions, wherever the older one was made."""
        if then.mean.device != now.mean.device:
            then = self.unpacked(self.packed(then))
        return now.low.distance(then.low)

    def packed(self, snapshot: Refreshed[Low]) -> dict[str, Tensor | None]:
        """A snapshot as tensors by name."""
        return self._packed(snapshot)

    def unpacked(self, tensors: Mapping[str, Any]) -> Refreshed[Low]:
        """And back, onto this factor's device; refuses what does not fit or is not finite."""
        return self._unpacked(tensors)

    # --- what it knows

    @abstractmethod
    def dense(self) -> Tensor:
        """The average itself as a matrix, in float64 (inspection and tests)."""

    @abstractmethod
    def spectrum(self) -> Tensor:
        """All eigenvalues of the average, descending, in float64."""

    @abstractmethod
    def trace(self) -> Tensor:
        """Trace of the average in float64, a number a group."""

    @property
    @abstractmethod
    def rank(self) -> int | None:
        """Eigenpairs kept, None when that has no meaning."""

    @property
    def nbytes(self) -> int:
        """Memory of the average."""
        return 0 if self._value is None else self._value.nbytes

    @property
    @abstractmethod
    def basis_nbytes(self) -> int:
        """Memory of the decomposition."""

    # --- memory

    def to(self, device: torch.device) -> None:
        """Go where the model went."""
        if self._like.device == device:
            return
        self._like = self._like.to(device)
        if self._value is not None:
            self._value = self._value.to(device)
        if self._away is not None:
            self._away = self._away.to(device)
        if self._refreshed is not None:
            self._refreshed = self._unpacked(self._packed(self._refreshed))

    @abstractmethod
    def _packed(self, refreshed: Refreshed[Low]) -> dict[str, Tensor | None]:
        """A decomposition as tensors by name."""

    @abstractmethod
    def _unpacked(self, tensors: Mapping[str, Any]) -> Refreshed[Low]:
        """And back, onto this factor's device."""

    def _saved(self, value: Tensor) -> Tensor:
        """The average as it is saved."""
        return value

    def _loaded(self, saved: Any) -> Tensor:
        """And back, a copy on this factor's device."""
        return restored(saved, self.shape, self._like, self._like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only."""
        if self._lent is None and not self.here:
            raise RuntimeError("another process keeps this average: save the state of the optimizer as a whole")
        value, level = self.lend() if self._lent is None else self._lent
        return {
            "value": value,
            "level": level,
            "weight": self._weight,
            "identity": self._identity,
            "updates": self.updates,
            "basis": None if self._refreshed is None else self._packed(self._refreshed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on this factor's own device; refuses what does not fit or is not finite."""
        value = None if state["value"] is None else self._loaded(state["value"])
        numbers = {key: float(state[key]) for key in ("level", "weight", "identity")}
        if (
            any(math.isnan(n) or n == math.inf for n in numbers.values())
            or min(numbers["weight"], numbers["identity"]) < 0
        ):
            raise ValueError(f"the saved factor holds senseless numbers: {numbers}")
        updates = state["updates"]
        if (
            isinstance(updates, bool)
            or not isinstance(updates, int)
            or updates < 0
            or (updates > 0) != (value is not None)
        ):
            raise ValueError(f"the saved factor counts {updates!r} updates")
        refreshed = None if state["basis"] is None else self._unpacked(state["basis"])
        self._value, self.updates, self._refreshed, self._away = value, updates, refreshed, None
        self._level, self._weight, self._identity = numbers["level"], numbers["weight"], numbers["identity"]


def _finite(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ValueError("a saved tensor is missing, not of floating point, or holds NaN or Inf")
    return tensor


def restored(tensor: Any, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A saved tensor of the expected shape, copied onto the device of `like`."""
    if tuple(_finite(tensor).shape) != shape:
        raise ValueError(f"a saved tensor has shape {tuple(tensor.shape)}, expected {shape}")
    copied: Tensor = tensor.to(device=like.device, dtype=dtype, copy=True)
    return copied

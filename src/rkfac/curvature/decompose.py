"""Strategies that decompose a running factor: small frozen values, chosen by `decomposition=`.

A field left None is taken from the request, that is from the optimizer's parameter group, where schedulers can change it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkfac import linalg
from rkfac.linalg import LowRank
from rkfac.linalg.checks import require_positive
from rkfac.linalg.cost import exact_is_cheaper


@dataclass(frozen=True, eq=False)
class Request:
    """All that a decomposition needs, so that it can run here, on another process or in the background.

    The matrix to decompose is matrix + shift * I. What matters of its spectrum is decided by the damping in force
    (`relative`: in units of the largest eigenvalue); `offset` is an identity kept apart from the matrix, which damps too.
    """

    strategy: Decomposition
    name: str
    rank: int | str
    oversampling: int
    power_iterations: int
    tail: str
    warm_start: bool
    damping: float
    relative: bool
    generator: torch.Generator
    affordable: int | None = None  # the largest rank worth its cost, for automatic ranks
    power: float = -1.0  # of the damped matrix that is wanted
    matrix: Tensor | None = None
    start: Tensor | None = None
    shift: float = 0.0
    offset: float = 0.0

    @property
    def X(self) -> Tensor:
        """The matrix, which the factor has put in."""
        if self.matrix is None:
            raise ValueError(f"the request for {self.name} has no matrix")
        return self.matrix


class Decomposition(ABC):
    """decompose(request) -> LowRank: the expensive part of a step, every `inverse_every` steps."""

    @abstractmethod
    def decompose(self, request: Request) -> LowRank:
        """Eigenpairs of the request's matrix; DecompositionError when that fails."""

    def exact_is_cheaper(self, request: Request) -> bool:
        """Whether the full eigendecomposition would take less time, by a fixed model."""
        return False

    def keeps_all(self, request: Request) -> bool:
        """Whether a small factor may be inverted as it is: no part of its spectrum is to be cut off."""
        return False

    @property
    def reads_rank(self) -> bool:
        """Whether a group's `rank` means anything to it."""
        return True

    def most(self, rank: int | str) -> int | None:
        """The most eigenpairs it keeps under a group's rank; None: it knows no bound."""
        return rank if isinstance(rank, int) else None

    def trimmed(self, low: LowRank, request: Request) -> LowRank:
        """Eigenpairs that are known already, cut to those that are asked for."""
        return low


@dataclass(frozen=True)
class Exact(Decomposition):
    """The full eigendecomposition: K-FAC proper, cubic in the layer's width. `rank` has no meaning here."""

    @property
    def reads_rank(self) -> bool:
        """It keeps everything."""
        return False

    def keeps_all(self, request: Request) -> bool:
        """It does."""
        return True

    def decompose(self, request: Request) -> LowRank:
        """All eigenpairs."""
        return linalg.eigh(request.X, tail=request.tail, shift=request.shift, name=request.name)


@dataclass(frozen=True)
class _Sketched(Decomposition):
    """A sketch of fixed or automatic rank, cold or warm-started.

    An automatic rank keeps what `share` asks for, at most `max_rank` and what the layer's batch makes affordable, and is
    exact where that is cheaper than a sketch.
    """

    rank: int | str | None = None
    oversampling: int | None = None
    power_iterations: int | None = None
    warm_start: bool | None = None
    share: float = 0.1
    max_rank: int | None = 256
    method: ClassVar[Callable[..., LowRank]]
    # Whether the extraction turns to X Q and does not stay in Q: a start then needs no power iterations of its own.
    beyond_its_range: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank != "auto":
            if isinstance(self.rank, str):
                raise ValueError(f"rank must be a positive integer or 'auto', got {self.rank!r}")
            require_positive(self.rank, "rank")
        for argument in ("oversampling", "power_iterations"):
            if (value := getattr(self, argument)) is not None:
                require_positive(value, argument, least=0)
        if self.max_rank is not None:
            require_positive(self.max_rank, "max_rank")
        if self.warm_start not in (None, True, False):
            raise ValueError(f"warm_start must be True or False, got {self.warm_start!r}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {self.share}")

    def exact_is_cheaper(self, request: Request) -> bool:
        """By the width of the sketch; an automatic rank finds out by itself, and cuts what is not needed."""
        rank = request.rank if self.rank is None else self.rank
        if not isinstance(rank, int):
            return False
        oversampling = request.oversampling if self.oversampling is None else self.oversampling
        power_iterations = request.power_iterations if self.power_iterations is None else self.power_iterations
        return exact_is_cheaper(request.X.shape[-1], rank + oversampling, power_iterations)

    def keeps_all(self, request: Request) -> bool:
        """An automatic rank is exact where that is cheapest; without a tail it leaves nothing in the place of what it cuts."""
        rank = request.rank if self.rank is None else self.rank
        return not isinstance(rank, int) and request.tail == "trace"

    @property
    def reads_rank(self) -> bool:
        """Unless it has one of its own."""
        return self.rank is None

    def most(self, rank: int | str) -> int | None:
        """Its own rank or the group's, and `max_rank` where that is automatic."""
        return super().most(rank if self.rank is None else self.rank) or self.max_rank

    def trimmed(self, low: LowRank, request: Request) -> LowRank:
        """To the rank, or to what the damping leaves visible."""
        rank = request.rank if self.rank is None else self.rank
        if isinstance(rank, int):
            return low.truncate(rank)
        if low.s.ndim > 1:  # ranks would differ between the groups
            return low
        damping = request.damping * (float(low.s[0]) + request.offset) if request.relative else request.damping
        known_rest: dict[str, Any] = {} if low.tail is None else {"trace": float(low.trace()), "d": low.dim}
        enough = linalg.sufficient_rank(low.s, request.offset + damping, self._share(request), **known_rest)
        return low.truncate(min(enough, self._ceiling(request) or low.dim))

    def _share(self, request: Request) -> float:
        """A mode that changes the inverse by so much changes another power of the matrix by `share`."""
        return min(1 - (1 - self.share) ** (-1 / request.power), 1 - 1e-9)

    def _ceiling(self, request: Request) -> int | None:
        """Of an automatic rank."""
        return min((most for most in (self.max_rank, request.affordable) if most is not None), default=None)

    def decompose(self, request: Request) -> LowRank:
        """Sketch the matrix, from the previous basis where a warm start is wanted."""
        rank = request.rank if self.rank is None else self.rank
        oversampling = request.oversampling if self.oversampling is None else self.oversampling
        power_iterations = request.power_iterations if self.power_iterations is None else self.power_iterations
        warm = request.warm_start if self.warm_start is None else self.warm_start
        start = request.start if warm else None
        method = type(self).method
        if isinstance(rank, int):
            return method(
                request.X,
                rank,
                oversampling,
                power_iterations,
                start=start,
                tail=request.tail,
                generator=request.generator,
                name=request.name,
                shift=request.shift,
            )
        if request.X.ndim > 2:  # ranks would differ between the groups; their factors are small anyway
            return Exact().decompose(request)
        return linalg.adaptive(
            request.X,
            request.damping,
            method=method,
            relative=request.relative,
            share=self._share(request),
            max_rank=self._ceiling(request),
            exact_if_cheaper=True,
            oversampling=oversampling,
            power_iterations=power_iterations,
            keep_start=type(self).beyond_its_range,
            start=start,
            tail=request.tail,
            generator=request.generator,
            name=request.name,
            shift=request.shift,
            offset=request.offset,
        )


@dataclass(frozen=True)
class RSVD(_Sketched):
    """Randomized SVD, V side (paper's Algorithm 2): RS-KFAC."""

    method = staticmethod(linalg.rsvd)


@dataclass(frozen=True)
class SREVD(_Sketched):
    """Symmetric randomized EVD (paper's Algorithm 3): SRE-KFAC."""

    beyond_its_range = False

    method = staticmethod(linalg.srevd)


@dataclass(frozen=True)
class Nystrom(_Sketched):
    """Nystrom: never less accurate than RSVD at the same number of products with the factor."""

    method = staticmethod(linalg.nystrom)


@dataclass(frozen=True)
class Auto(Decomposition):
    """Exact where that is cheapest, and `large` (warm-started Nystrom) for the wider factors.

    By a fixed model of the cost (`linalg/cost.py`), or up to a given width.
    """

    exact_up_to: int | None = None
    large: Decomposition = Nystrom(warm_start=True)

    def __post_init__(self) -> None:
        if self.exact_up_to is not None:
            require_positive(self.exact_up_to, "exact_up_to", least=0)
        if not isinstance(self.large, Decomposition):
            raise ValueError(f"large must be a strategy such as rkfac.Nystrom(), got {self.large!r}")

    def decompose(self, request: Request) -> LowRank:
        """By the factor's size."""
        d = request.X.shape[-1]
        exact = self.large.exact_is_cheaper(request) if self.exact_up_to is None else d <= self.exact_up_to
        return (Exact() if exact else self.large).decompose(request)

    def keeps_all(self, request: Request) -> bool:
        """As `large` does."""
        return self.large.keeps_all(request)

    @property
    def reads_rank(self) -> bool:
        """As `large` does."""
        return self.large.reads_rank

    def most(self, rank: int | str) -> int | None:
        """What `large` keeps."""
        return self.large.most(rank)

    def trimmed(self, low: LowRank, request: Request) -> LowRank:
        """As `large` does."""
        return self.large.trimmed(low, request)

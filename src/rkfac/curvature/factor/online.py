"""A factor known by its leading eigenpairs alone, which every statistic updates: no matrix as wide as the side is formed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.decompose import Request
from rkfac.curvature.factor.base import LOWEST_LEVEL, Refreshed, Start, restored
from rkfac.curvature.factor.dense import TYPICAL_RANK, DenseFactor
from rkfac.curvature.factor.lowrank import LowRankFactor
from rkfac.curvature.moment import Moment, RowsMoment
from rkfac.linalg import DecompositionError, LowRank, correct, online_update

VARIANTS = ("b", "b-r", "b-r-c")
LEAST_CHUNK = 64  # rows that are taken at once though a basis of them and of the kept modes is wider than the factor
STRAY = 1e-2  # by which a saved basis may miss being orthonormal


@dataclass(frozen=True)
class Brand:
    """Brand's update alone ("b"), with a decomposition of the true average from time to time ("-r"), with corrections ("-c").

    Beyond "b" the average is kept as a matrix as well: overwriting every `overwrite_every` refreshes, from the first on, and
    correcting a `correct_share` of the kept modes every `correct_every` updates both read it.
    """

    variant: str = "b"
    overwrite_every: int = 5
    correct_every: int = 5
    correct_share: float = 0.2

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, got {self.variant!r}")
        for name in ("overwrite_every", "correct_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        share = self.correct_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"correct_share must be a number in (0, 1], got {share!r}")

    @property
    def keeps_average(self) -> bool:
        """Whether the average is kept as a matrix beside its eigenpairs."""
        return self.variant != "b"

    def overwrites(self, refreshes: int) -> bool:
        """Whether the refresh after so many decomposes the average itself."""
        return self.keeps_average and refreshes % self.overwrite_every == 0

    def corrects(self, updates: int) -> bool:
        """Whether so many updates end with a correction."""
        return self.variant == "b-r-c" and updates % self.correct_every == 0

    def corrected(self, modes: int) -> int:
        """How many of them a correction turns."""
        return min(modes, round(self.correct_share * modes + 1))


class OnlineFactor(LowRankFactor):
    """X ~ U diag(s) U^T + identity * I + what was cut, whose trace is known; `shape` is (d,), the value is U (d, r).

    O(d (r + n)^2) a statistic of n rows: exact before it is cut to the r largest modes, so that the kept part lies below
    the average, by the decayed sum of what was cut (but for the corrections of "b-r-c"). `s` and the trace are in true
    units and float64.
    """

    kind = "online"

    def __init__(self, shape: tuple[int, ...], start: Start, like: Tensor, method: Brand | None = None) -> None:
        super().__init__(shape, start, like)
        self.method = Brand() if method is None else method
        self.square = self.method.keeps_average
        self.most_rows: int | None = None  # of a statistic, beyond which they may come summed up
        self.average = DenseFactor(shape, start, like) if self.method.keeps_average else None
        self.refreshes = 0
        self.trouble = ""  # why the last statistic did not reach the modes
        self._s = torch.zeros(0, dtype=torch.float64, device=like.device)
        self._trace = torch.zeros((), dtype=torch.float64, device=like.device)
        self.prepare(TYPICAL_RANK, torch.Generator, "the factor")

    def prepare(self, modes: int, generator: Callable[[], torch.Generator], name: str) -> None:
        """How many modes the coming statistic leaves, where a correction's random columns come from, what errors call it."""
        self._modes, self._generator, self._name = min(modes, self.shape[-1]), generator, name

    def moment(self) -> RowsMoment:
        """Rows."""
        return RowsMoment(self.most_rows)

    def _zero(self) -> Tensor:
        return self._like.new_zeros(self.shape[-1], 0)

    @property
    def kept(self) -> LowRank:
        """The part of the average without its identity that is known, in true units."""
        return LowRank(self._present, self._s)

    def take(self, moment: Moment, decay: float) -> None:
        """Brand's update by the rows of one more statistic.

        Where that fails they enter the trace alone, as if all of them had been cut, and the coming refresh says so.
        """
        assert isinstance(moment, RowsMoment), "an online factor is updated by rows"
        if self.average is not None:
            self.average.take(moment, decay)
        self._value = self._present
        keep, share = self._weights(decay)
        self._trace, self.trouble = self._trace * keep, ""
        if moment.dead:
            self._put(self._value, self._s * keep)
            return
        rows, unit = moment.weighted()
        rows = rows.to(self._like.dtype)
        self._trace = self._trace + torch.linalg.vector_norm(rows, dtype=torch.float64).square() * (share * unit)
        low = LowRank(self._value, self._s * (keep / unit))
        try:
            for some in rows.split(max(self.shape[-1] - self._modes, LEAST_CHUNK)):
                # Half of twice both is their sum: what decays has decayed already.
                doubled = LowRank(low.U, 2 * low.s)
                low = online_update(doubled, (2 * share) ** 0.5 * some.mT, 0.5, self._modes, self._name)
        except DecompositionError as error:
            self.trouble = str(error)
            low = LowRank(self._value, self._s * (keep / unit))
        self._put(low.U, low.s * unit)
        if self.average is not None and self.method.corrects(self.updates):
            self._correct(self.average)

    def _put(self, U: Tensor, s: Tensor) -> None:
        self._value, self._s = U, torch.where(s < 2.0**LOWEST_LEVEL, 0.0, s)

    def _correct(self, average: DenseFactor) -> None:
        """Rayleigh-Ritz of the average on some of the kept modes."""
        X, unit = average.whole()
        modes = len(self._s)
        generator = self._generator()
        chosen = torch.randperm(modes, generator=generator, device=generator.device)[: self.method.corrected(modes)]
        try:
            low = correct(LowRank(self._present, self._s / unit), X, chosen.to(self._s.device), self._name)
        except DecompositionError as error:
            self.trouble = str(error)
        else:
            self._put(low.U, low.s * unit)

    # --- the decomposition

    def refresh(self, request: Request) -> Refreshed[LowRank]:
        """The kept modes, cut to the rank; or a decomposition of the average where that is due."""
        if self.trouble:
            raise DecompositionError(self.trouble)
        if self.average is not None and self.method.overwrites(self.refreshes):
            return self.average.refresh(replace(request, start=self._basis))
        return self._asked(self._filled(request.tail), request)

    def _filled(self, tail: str) -> LowRank:
        """The kept modes, one at least, and what stands for all the others."""
        low = self.kept
        if low.rank == 0:
            U = self._like.new_zeros(self.shape[-1], 1)
            U[0] = 1
            low = LowRank(U, self._s.new_zeros(1))
        return low.with_trace(self._trace) if tail == "trace" else low

    def adopt(self, refreshed: Refreshed[LowRank]) -> None:
        """Use it from now on; one of the average itself is also what later statistics update."""
        super().adopt(refreshed)
        if self.method.overwrites(self.refreshes):
            low = refreshed.low
            self._put(low.U.to(self._like.dtype), (low.s - self._identity).clamp_min(0))
        self.refreshes += 1

    @property
    def refresh_cost(self) -> int:
        """What the modes take to be copied, or the average to be decomposed."""
        return self.shape[-1] * TYPICAL_RANK if self.average is None else self.average.refresh_cost

    # --- what it knows

    def dense(self) -> Tensor:
        """The average where it is kept, otherwise the kept modes with the rest of the trace spread over all others."""
        if self.average is not None:
            return self.average.dense()
        low = self._filled("trace")
        return LowRank(low.U.double(), low.s, low.tail).dense() + self._identity * torch.eye(
            self.shape[-1], dtype=torch.float64, device=self._like.device
        )

    def spectrum(self) -> Tensor:
        """Of the same matrix."""
        if self.average is not None:
            return self.average.spectrum()
        low = self._filled("trace")
        whole = torch.cat([low.s, low.fill.expand(low.dim - low.rank)])
        return whole.sort(descending=True)[0] + self._identity

    def trace(self) -> Tensor:
        """Of the true average, whatever was cut."""
        return self._trace + self._identity * self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Memory of the modes, and of the average where it is kept."""
        return super().nbytes + self._s.nbytes + (0 if self.average is None else self.average.nbytes)

    # --- memory

    def to(self, device: torch.device) -> None:
        """Go where the model went."""
        super().to(device)
        self._s, self._trace = self._s.to(device), self._trace.to(device)
        if self.average is not None:
            self.average.to(device)

    def _loaded(self, saved: Any) -> Tensor:
        d, modes = self.shape[-1], saved.shape[-1] if isinstance(saved, Tensor) and saved.ndim else 0
        U = restored(saved, (d, modes), self._like, self._like.dtype)
        if modes > d or bool((U.mT @ U - torch.eye(modes, dtype=U.dtype, device=U.device)).abs().gt(STRAY).any()):
            raise ValueError(f"{modes} saved modes of a factor of width {d} are not orthonormal")
        return U

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only."""
        return {
            **super().state_dict(),
            "s": self._s,
            "trace": self._trace,
            "refreshes": self.refreshes,
            "trouble": self.trouble,
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; refuses what does not fit or is not finite."""
        modes = 0 if state["value"] is None else state["value"].shape[-1]
        s = restored(state["s"], (modes,), self._like, torch.float64)
        trace = restored(state["trace"], (), self._like, torch.float64)
        refreshes, trouble = state["refreshes"], state["trouble"]
        if (
            isinstance(refreshes, bool)
            or not isinstance(refreshes, int)
            or refreshes < 0
            or not isinstance(trouble, str)
        ):
            raise ValueError(f"the saved factor counts {refreshes!r} refreshes, with the trouble {trouble!r}")
        if bool((s < 0).any()) or float(trace) < 0:
            raise ValueError("the saved factor has negative eigenvalues")
        if (state["average"] is None) != (self.average is None):
            raise ValueError("the saved factor was kept in another way")
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        super().load_state_dict(state)
        self._s, self._trace, self.refreshes, self.trouble = s, trace, refreshes, trouble

"""A table that is also a head: one weight whose rows are looked up at one end of a model and multiplied by at the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rkfac.curvature.block.kronecker import KroneckerBlock
from rkfac.curvature.calls import Pass
from rkfac.curvature.factor import DenseFactor, DiagonalFactor, Factor
from rkfac.curvature.moment import DiagonalMoment, JoinedMoment, Moment, SquareMoment
from rkfac.curvature.statistics import Statistics
from rkfac.layers.base import Use
from rkfac.layers.embedding import EmbeddingAdapter


class TiedStatistics(Statistics):
    """Two layers' statistics in one: those of the lookups and those of the head's rows.

    As layers of their own the two have the K-FAC blocks F_u = X_u (x) Y_u, X_u on the side of the table's rows and Y_u on
    the side of its width: X_1 = A_1 counts lookups and Y_1 = G_1 is that of their gradients, X_2 = G_2 is that of the
    gradients at the head's output, its diagonal alone, and Y_2 = A_2 that of the head's inputs (`Statistics.settle` gives
    all four their units). The block of the sum of both gradients is taken to be F = F_1 + F_2, and one product stands for
    it: X (x) Y with F's own partial traces. With f_u = tr X_u tr Y_u and f = f_1 + f_2,

        X = sum_u (f_u / f) X_u / tr X_u   (trace one),      Y = sum_u f_u Y_u / tr Y_u   (trace f).

    A use enters by its product alone, so that it does not matter how a scale is split between its two sides; a use whose
    gradient is zero, or that did not happen, leaves the other one's K-FAC block.
    """

    def __init__(self) -> None:
        super().__init__(())
        self._lookups = Statistics((DiagonalMoment(), Moment()))
        self._head = Statistics((Moment(), SquareMoment()))

    def of(self, use: Use) -> Statistics:
        """Calls of tables are lookups, those of Linear layers the head's."""
        return self._lookups if isinstance(use.adapter, EmbeddingAdapter) else self._head

    def count(self, use: Use, one_pass: Pass, terms: int, rows: int, tokens: int) -> None:
        """For itself and for the one that the call belongs to."""
        super().count(use, one_pass, terms, rows, tokens)
        self.of(use).count(use, one_pass, terms, rows, tokens)

    @property
    def parts(self) -> tuple[Statistics, ...]:
        """Both uses count for themselves as well."""
        return (self, self._lookups, self._head)

    @property
    def summed(self) -> tuple[Moment, Moment, Moment, Moment]:
        """On the side of the table's rows and of its width: those of the lookups, then those of the head."""
        (counts, gradients), (inputs, squares) = self._lookups.moments, self._head.moments
        return counts, gradients, squares, inputs

    @property
    def _seen(self) -> list[tuple[Statistics, Moment, Moment]]:
        """What happened, with its moments on the side of the table's rows and on that of its width."""
        (counts, gradients), (inputs, squares) = self._lookups.moments, self._head.moments
        both = [(self._lookups, counts, gradients), (self._head, squares, inputs)]
        return [entry for entry in both if not entry[0].empty]

    def readings(self) -> list[Tensor]:
        """Also the traces."""
        own = [t for statistics, _, _ in self._seen for t in statistics.readings()]
        return own + [moment.trace() for _, *moments in self._seen for moment in moments]

    def settle(self, numbers: list[float], loss_average: str, sampled: bool, loss_scale: float, summed: bool) -> bool:
        """Each by itself, then as one."""
        for statistics, _, _ in self._seen:
            own = sum(moment.numbers for moment in statistics.moments)
            if not statistics.settle(numbers[:own], loss_average, sampled, loss_scale, summed):
                return False
            numbers = numbers[own:]
        X, Y = [x for _, x, _ in self._seen], [y for _, _, y in self._seen]
        traces_X, traces_Y = (
            [moment.scale * trace for moment, trace in zip(side, numbers[first::2], strict=True)]
            for first, side in enumerate((X, Y))
        )
        f = [x * y for x, y in zip(traces_X, traces_Y, strict=True)]
        # Where all gradients are zero, whatever has rows on the table's side counts alike.
        shares = f if any(f) else [float(x > 0) for x in traces_X]
        for moment, trace, share in zip(X, traces_X, shares, strict=True):
            moment.scale *= share / (sum(shares) * trace) if share else 0.0
        for moment, trace, own_f in zip(Y, traces_Y, f, strict=True):
            moment.scale *= own_f / trace if own_f else 0.0
        self.moments = (JoinedMoment(X), JoinedMoment(Y))
        return True


class TiedBlock(KroneckerBlock):
    """Lookups and rows in one pair of factors: a diagonal as long as the table, a matrix as wide as it."""

    kind = "tied"

    def statistics(self) -> Statistics:
        """Of both uses apart: their units differ."""
        return TiedStatistics()

    @property
    def ownable(self) -> tuple[str, ...]:
        """Neither: what both uses weigh is decided by sums of all four moments."""
        return ()

    def summands(self) -> list[tuple[Factor[Any], Moment]]:
        """Four, two a side, in a layout of their own: of a side that is left out the traces are asked for all the same."""
        assert isinstance(self.pending, TiedStatistics)
        start, like = self.settings.start, self._like
        table, width = DiagonalFactor(self.input.shape, start, like), DenseFactor(self.output.shape, start, like)
        return list(zip((table, width) * 2, self.pending.summed, strict=True))

    def wants(self, side: str) -> bool:
        """Both, for the traces of all four moments tell what each use counts."""
        return True

"""What one step tells about a layer: moments of its rows, and how many samples and positions they stand for.

Everything that scales a statistic (what the loss averages over, positions, a gradient scaler) is undone here and nowhere
else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rkfac.curvature.calls import Pass
from rkfac.layers.base import Use


@dataclass(eq=False)
class Statistics:
    """The moments of one layer since the last step (inputs first, gradients last) and what they stand for."""

    moments: tuple[Any, ...]  # `Collected`, each of the kind that its block made
    calls: int = 0
    rows: int = 0
    others: list[Tensor] = field(default_factory=list)  # of a block's own: not finite, and nothing counts
    _terms: dict[Pass, int] = field(default_factory=dict)  # of the loss, by pass
    _tokens: dict[Pass, int] = field(default_factory=dict)  # of all calls, by pass

    @property
    def empty(self) -> bool:
        """Whether no row came in."""
        return self.rows == 0

    def of(self, use: Use) -> Statistics:
        """Where calls of one of a weight's owners belong."""
        return self

    def count(self, use: Use, one_pass: Pass, terms: int, rows: int, tokens: int) -> None:
        """One more call of the layer: calls within a pass are positions, calls in another are more samples."""
        self._terms[one_pass] = terms
        self.calls += 1
        self.rows += rows
        self._tokens[one_pass] = self._tokens.get(one_pass, 0) + tokens

    @property
    def tokens(self) -> int:
        """How many came by; known when the backward pass is over."""
        return sum(one_pass.bounded(count) for one_pass, count in self._tokens.items())

    @property
    def parts(self) -> tuple[Statistics, ...]:
        """All that keep counts of their own."""
        return (self,)

    def counts(self) -> list[int]:
        """What it stands for, in numbers that add up over processes."""
        return [self.calls, self.rows, self.tokens, sum(self._terms.values())]

    def stand_for(self, calls: int, rows: int, tokens: int, terms: int) -> None:
        """Go over to the counts of all processes."""
        everybody = Pass()
        self.calls, self.rows, self._tokens, self._terms = calls, rows, {everybody: tokens}, {everybody: terms}

    def samples(self, loss_average: str) -> int:
        """N: how many terms the loss averages over."""
        if loss_average == "tokens":
            return self.tokens  # not rows: those of norms and of weight_sharing="reduce" are whole samples
        return sum(self._terms.values())

    def of_squares(self, loss_average: str, sampled: bool, loss_scale: float, times: float = 1.0) -> float:
        """`times` what turns a sum of squared gradients into the mean square of the gradients of one sample's loss."""
        samples = self.samples(loss_average)
        if sampled:
            return times / samples
        return (times / samples if loss_average == "sum" else times * samples) / loss_scale**2

    def settle(self, numbers: list[float], loss_average: str, sampled: bool, loss_scale: float, summed: bool) -> bool:
        """Read the peaks and set all scales; False when something is not finite.

        With N samples and S positions a sample, A = sum a a^T / (N S^2) and G = S / N sum g^ g^^T, where g^ is the
        gradient of one sample's loss: N g for a loss averaged over the batch, g for a summed one. Their product is the
        KFC block; the split of S^2 between the two is the paper's. `summed`: positions are summed inside a row already.
        """
        for moment in self.moments:
            if not moment.settle(numbers[: moment.numbers]):
                return False
            numbers = numbers[moment.numbers :]
        if not all(map(math.isfinite, numbers)):
            return False
        samples = self.samples(loss_average)
        positions = 1.0 if summed else self.rows / samples
        *inputs, output = self.moments
        output.scale = self.of_squares(loss_average, sampled, loss_scale, positions)
        for moment in inputs:
            moment.scale = 1 / (samples * positions**2)
        return True

    def readings(self) -> list[Tensor]:
        """All numbers the host must read, in the order `settle` takes them."""
        return [*(t for moment in self.moments for t in moment.readings()), *self.others]

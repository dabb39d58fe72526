"""Levenberg-Marquardt damping: trust the quadratic model more when it predicts well, less when it does not."""

from __future__ import annotations

from dataclasses import dataclass

from rkfac.optim.arguments import POSITIVE


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Every `every` steps compare the loss's real change with the model's, and move the damping by `factor`^`every`.

    Needs `optimizer.step(closure)`: on those steps the closure runs once more after the update (one extra forward and
    backward). Martens and Grosse: lower the damping when the ratio exceeds 3/4, raise it below 1/4.
    """

    every: int = 5
    factor: float = 0.95
    smallest: float = 1e-6
    largest: float = 1e3

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be an integer >= 1, got {self.every!r}")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must lie strictly between 0 and 1, got {self.factor}")
        POSITIVE("smallest", self.smallest)
        POSITIVE("largest", self.largest)

    def adapted(self, damping: float, actual: float, predicted: float) -> float:
        """The next damping, from the actual and the predicted change of the loss (both negative when all is well)."""
        ratio = actual / predicted if predicted < 0 else -1.0
        if not ratio >= 0.25:  # NaN counts as a bad prediction
            damping = damping / self.factor**self.every
        elif ratio > 0.75:
            damping = damping * self.factor**self.every
        return min(max(damping, self.smallest), self.largest)

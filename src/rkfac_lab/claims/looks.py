"""What is read of a spectrum: how many modes stand above the paper's line, from either start, and how they grow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rkfac_lab.spectrum import NEGLIGIBLE

POINTS = 60  # of a curve


def widest(layer: nn.Module) -> int:
    """The larger side of a layer's two factors."""
    weight = layer.get_parameter("weight")
    return max(len(weight), weight[0].numel() + 1)


def started_from_identity(values: Tensor, decay: float, updates: int) -> Tensor:
    """Eigenvalues of the same average, had it begun with the identity."""
    return (1 - decay**updates) * values + decay**updates


def modes(values: Tensor) -> int:
    """How many are above a 33rd of the largest."""
    return int((values > NEGLIGIBLE * values[0]).sum())


def looked(values: Tensor, decay: float, step: int, updates: int) -> dict[str, int]:
    """Modes from either start, after so many updates of the average."""
    begun = started_from_identity(values, decay, updates)
    return {"step": step, "unbiased": modes(values), "identity": modes(begun)}


def curve(values: Tensor) -> list[list[float]]:
    """Some of the modes, by their number, relative to the first."""
    last = len(values)
    chosen = sorted({round(math.exp(t)) for t in torch.linspace(0, math.log(last), POINTS).tolist()})
    return [[k, float(f"{float(values[k - 1] / values[0]):.4g}")] for k in chosen if 1 <= k <= last]


Series = Sequence[Mapping[str, Any]]  # factors that differ in the width of their network alone, in its order


def fullest(series: Iterable[Series]) -> str:
    """The factor with the most modes after the last step."""
    factors = [factor for one in series for factor in one]
    if not factors:
        return "none"
    most_of_all = max(factors, key=_last)
    return f"{_last(most_of_all)} modes (of {most_of_all['d']})"


def most(series: Iterable[Series]) -> int:
    """Modes after the last step."""
    return max((_last(factor) for one in series for factor in one), default=0)


def growth(series: Iterable[Series], above: int = 0) -> float | None:
    """How many times as many modes the widest factor has as the narrowest; the most of all, of factors wider than `above`."""
    wide = [[factor for factor in one if factor["d"] > above] for one in series]
    return max((_last(one[-1]) / max(_last(one[0]), 1) for one in wide if len(one) > 1), default=None)


def _last(factor: Mapping[str, Any]) -> int:
    return int(factor["looks"][-1]["unbiased"])

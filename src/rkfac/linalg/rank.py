"""A-posteriori errors of a decomposition, and the rank that a given damping asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rkfac.linalg.checks import require_positive
from rkfac.linalg.cost import exact_is_cheaper
from rkfac.linalg.exact import eigh
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.operand import Operand
from rkfac.linalg.shapes import Float
from rkfac.linalg.sketch import nystrom

Sketch = Callable[..., LowRank]


def trace_error(X: Float[Tensor, "*batch d d"], low: LowRank) -> Float[Tensor, "*batch"]:
    """Bound ||X - low||_2 <= tr X - sum(s), free, for Nystrom and exact decompositions (error PSD) with tail "zero"."""
    missing = X.diagonal(dim1=-2, dim2=-1).double().sum(-1) - low.s.double().sum(-1)
    return missing.clamp_min(0).to(X.dtype)


def probe_error(
    X: Float[Tensor, "*batch d d"], low: LowRank, probes: int = 6, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch"]:
    """Bound on ||X - low||_2 for any method, from Gaussian probes; wrong with probability at most 10^-probes.

    10 sqrt(2/pi) max_i ||(X - low) w_i||; costs (2 d^2 + 4 d r) flops a probe.
    """
    require_positive(probes, "probes")
    w = torch.randn(*X.shape[:-1], probes, dtype=X.dtype, device=X.device, generator=generator)
    operand = Operand.of(X, 0.0, "the matrix")
    difference = operand @ w - low.shifted(0.0, operand.scale) @ w
    largest = torch.linalg.vector_norm(difference, dim=-2).amax(-1)
    return largest.mul(10 * math.sqrt(2 / math.pi)) / operand.scale


def inverse_error(error: float, damping: float) -> float:
    """Bound on ||(X + l I)^-1 - (X_N + l I)^-1||_2 times l, when X - X_N is PSD with norm `error`: e / (e + l)."""
    return error / (error + damping)


def sufficient_rank(
    s: Float[Tensor, "p"], damping: float, share: float = 0.1, *, trace: float | None = None, d: int | None = None
) -> int:
    """Smallest rank whose discarded modes perturb the damped inverse by at most `share` of its largest entry.

    Mode i may go when s_i / (s_i + damping) <= share, that is s_i <= damping share / (1 - share). Where a tail t, the mean
    of what is discarded (`trace` and `d` tell it), stands for the discarded modes, the same holds for s_i - t beside
    damping + t: a flat spectrum needs hardly any mode. Modes below the tail are damped more than their own would be, by
    whatever that is: the share bounds how much too large the inverse is, not how much too small.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    tail = torch.zeros_like(s)
    if trace is not None and d is not None:
        kept = torch.arange(len(s), dtype=s.dtype, device=s.device)  # before mode i
        tail = ((trace - (s.cumsum(0) - s)) / (d - kept)).clamp_min(0)
    matters = s - tail > (damping + tail) * share / (1 - share)
    return max(1, int(matters.cumprod(0).sum()))


def adaptive(
    X: Float[Tensor, "d d"],
    damping: float,
    *,
    method: Sketch = nystrom,
    relative: bool = True,
    share: float = 0.1,
    first_rank: int = 64,
    max_rank: int | None = None,
    exact_if_cheaper: bool = False,
    oversampling: int = 10,
    power_iterations: int = 1,
    keep_start: bool = False,
    start: Float[Tensor, "d k"] | None = None,
    tail: str = "zero",
    generator: torch.Generator | None = None,
    name: str = "the matrix",
    shift: float = 0.0,
    offset: float = 0.0,
) -> LowRank:
    """A sketch at the smallest rank that `sufficient_rank` accepts, found by growing it until it does.

    The first attempt has the rank of `start` (or `first_rank`) and is judged by all its values, the oversampled ones
    included: while even the last of them still matters the sketch doubles, warm-started from what it has. What is not
    needed is cut off, but a rank within one twentieth of what is needed is left alone, so that modes at the threshold do
    not make it swing; where nothing changed one sketch is made. `relative` measures the damping in units of the largest
    eigenvalue. `offset` is a multiple of the identity that stands beside the decomposed matrix and damps as well.
    With `keep_start` (see `rsvd`) a warm sketch costs little more than one product. `exact_if_cheaper` decomposes exactly,
    and cuts afterwards, where `linalg/cost.py` holds that for cheaper.
    """
    require_positive(first_rank, "first_rank")
    if max_rank is not None:
        require_positive(max_rank, "max_rank")
    d = X.shape[-1]
    ceiling = d if max_rank is None else min(max_rank, d)
    rank = min(first_rank if start is None else start.shape[-1], ceiling)
    known = 0 if start is None else rank
    known_rest: dict[str, Any] = {}
    if tail == "trace":
        known_rest = {"trace": float(X.diagonal().double().sum()) + shift * d, "d": d}
    sketch: dict[str, Any] = {"tail": tail, "generator": generator, "name": name, "shift": shift}
    if keep_start:
        sketch["keep_start"] = True
    while True:
        width = rank + max(oversampling, 1, rank // (8 if keep_start else 20))
        powers = 0 if keep_start and start is not None else power_iterations
        if exact_if_cheaper and exact_is_cheaper(d, width, powers):
            low = eigh(X, tail=tail, name=name, shift=shift)
        else:
            low = method(X, width, 0, power_iterations, start=start, **sketch)
        threshold = offset + (damping * (float(low.s[0]) + offset) if relative else damping)
        enough = sufficient_rank(low.s, threshold, share, **known_rest)
        if enough < low.rank or rank >= ceiling or low.full:
            margin = max(1, known // 20)
            return low.truncate(min(known if enough <= known <= enough + margin else enough, ceiling))
        start, rank = low.U, min(2 * low.rank, ceiling)

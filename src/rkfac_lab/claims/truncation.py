"""A step with some of the modes of both factors against that with all of them; truncation is exact, no sketch blurs it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rkfac import linalg
from rkfac_lab.claims.captured import OLD, YOUNG, Captured, apart, rounded

TAILS = ("zero", "trace")
SMALL_ERROR, LARGE_COSINE = 0.05, 0.995  # of a step that has lost nothing to speak of
FINER = 1.25  # from one rank that is tried to the next


class Modes(NamedTuple):
    """A layer in the eigenbases of its factors: eigenvalues of both, descending, and the coordinates of the gradient."""

    g: Tensor
    a: Tensor
    J: Tensor


def modes(layer: Captured) -> Modes:
    """With all of them."""
    G, A = linalg.eigh(layer.G), linalg.eigh(layer.A)
    return Modes(G.s, A.s, G.U.mT @ layer.J @ A.U)


def without_identity(full: Modes, remnant: float) -> Modes:
    """The identity has every basis for its own, so that only eigenvalues change."""
    return full._replace(g=(full.g - remnant).clamp_min(0), a=(full.a - remnant).clamp_min(0))


def truncated(values: Tensor, rank: int, tail: str) -> Tensor:
    """The leading `rank` eigenvalues, and what stands for the others: zero, or their mean."""
    if rank >= len(values):
        return values
    rest = values[rank:].mean() if tail == "trace" else values.new_zeros(())
    return torch.cat([values[:rank], rest.expand(len(values) - rank)])


def step(full: Modes, ranks: tuple[int, int], tail: str, damping: tuple[float, str]) -> Tensor:
    """(G + l)^-1 J (A + l)^-1 in these coordinates, with so many modes of G and of A."""
    amount, unit = damping
    inverses = []
    for values, rank in zip((full.g, full.a), ranks, strict=True):
        size = values[0] if unit == "largest" else values.mean()
        inverses.append(1 / (truncated(values, rank, tail) + amount * size))
    return full.J * inverses[0][:, None] * inverses[1]


def errors(full: Modes, rank: int, tail: str, damping: tuple[float, str]) -> tuple[float, float]:
    """Relative error and cosine of the step with `rank` modes of each factor, against that with all."""
    every = len(full.g), len(full.a)
    return apart(step(full, (rank, rank), tail, damping), step(full, every, tail, damping))


def is_enough(relative: float, cosine: float) -> bool:
    """Whether a step has lost nothing to speak of."""
    return relative < SMALL_ERROR and cosine > LARGE_COSINE


def enough(full: Modes, tail: str, damping: tuple[float, str]) -> int:
    """The smallest rank that is tried (a quarter more each time) from which on every step has lost nothing to speak of."""
    most = max(len(full.g), len(full.a))
    tried = sorted({min(most, math.ceil(FINER**k)) for k in range(math.ceil(math.log(most, FINER)) + 1)}, reverse=True)
    found = most
    for rank in tried:
        if not is_enough(*errors(full, rank, tail, damping)):
            break
        found = rank
    return found


def automatic(values: Tensor, tail: str, damping: tuple[float, str]) -> int:
    """What rank="auto" asks for of a spectrum, without a bound on it."""
    amount, unit = damping
    size = float(values[0] if unit == "largest" else values.mean())
    rest: dict[str, Any] = {"trace": float(values.sum()), "d": len(values)} if tail == "trace" else {}
    return linalg.sufficient_rank(values, amount * size, **rest)


def measured(layer: Captured, ranks: Sequence[int], dampings: Sequence[tuple[float, str]]) -> Iterator[dict[str, Any]]:
    """One row an average, damping and tail: what each rank costs, which is enough, and what the automatic rule keeps."""
    young = modes(layer)
    for average, full in ((YOUNG, young), (OLD, without_identity(young, layer.remnant))):
        for damping in dampings:
            for tail in TAILS:
                found = [errors(full, rank, tail, damping) for rank in ranks]
                kept = automatic(full.g, tail, damping), automatic(full.a, tail, damping)
                every = len(full.g), len(full.a)
                at_auto = apart(step(full, kept, tail, damping), step(full, every, tail, damping))
                yield {
                    "workload": layer.workload,
                    "layer": layer.layer,
                    "step": layer.step,
                    "widths": [len(full.a), len(full.g)],
                    "average": average,
                    "damping": list(damping),
                    "tail": tail,
                    "relative": [rounded(relative) for relative, _ in found],
                    "cosine": [rounded(cosine) for _, cosine in found],
                    "enough": enough(full, tail, damping),
                    "auto": {
                        "ranks": [kept[1], kept[0]],
                        "relative": rounded(at_auto[0]),
                        "cosine": rounded(at_auto[1]),
                    },
                }

"""That all processes train the same model in the same way, compared once, when they first meet."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rkfac import compat
from rkfac.distributed.world import World


def agree(world: World, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
    """Refuse processes that differ, by name; everybody raises, nobody is left waiting."""
    mine = {
        "torch": torch.__version__,
        "the model": _listed(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters.items()),
        "what is trained": _listed(name for name, p in parameters.items() if p.requires_grad),
        **{name: str(value) for name, value in settings.items()},
    }
    everybody = world.told(mine, "which model and settings they have")
    if differing := _differing(everybody):
        raise ValueError(
            f"the {world.size} processes do not train the same thing: {'; '.join(differing)}. Build the same model with the "
            "same settings in every process"
        )


def look_at_weights(world: World, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse replicas with other weights: their steps would be alike, and they would stay apart."""
    parameters = {name: p for name, p in parameters.items() if not compat.is_sharded(p)}
    if not parameters:
        return
    sums = [p.detach().double().sum().item() for p in parameters.values()]
    rows = world.gathered(sums, next(iter(parameters.values())).device, "a look at their parameters")
    columns = zip(parameters, zip(*rows, strict=True), strict=True)
    differing = [name for name, column in columns if len(set(map(str, column))) > 1]  # NaN is NaN
    if differing:
        names = ", ".join(map(repr, differing[:3])) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise ValueError(
            f"{names} have other values in other processes: give all the same weights, as DistributedDataParallel does, "
            "before the first step"
        )


def _listed(lines: Any) -> str:
    """How many, and what they are in a few letters."""
    lines = list(lines)
    return f"{len(lines)} parameters ({hashlib.blake2b(repr(lines).encode(), digest_size=6).hexdigest()})"


def _differing(everybody: Sequence[Mapping[str, str]]) -> list[str]:
    """What is not the same everywhere, with who has what."""
    found = []
    for name in dict.fromkeys(name for one in everybody for name in one):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            by_value.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            who = ", ".join(f"{value} in process {' '.join(map(str, ranks))}" for value, ranks in by_value.items())
            found.append(f"{name}: {who}")
    return found

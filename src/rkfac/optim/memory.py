"""Resuming: what a saved state must look like, and loading that changes everything or nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rkfac import compat
from rkfac.curvature.block import Block, Settings
from rkfac.curvature.fisher import Likelihood
from rkfac.optim.report_text import listed

STATE_FORMAT = 7


def fingerprint(settings: Settings, likelihood: Likelihood | None, graft: str | None, fallback: str) -> dict[str, str]:
    """The choices that give a saved state its meaning, in words."""
    return {
        "decomposition": _words(settings.decomposition),
        "damping": _words(settings.damping),
        "tail": settings.tail,
        "weight_sharing": settings.weight_sharing,
        "rows": "all" if settings.rows is None else str(settings.rows),
        "loss_average": settings.loss_average,
        "factor_start": _words(settings.start),
        "stagger": str(settings.stagger),
        "sides": settings.sides,
        "stale": str(settings.stale),
        "method": str(settings.method),
        "fisher": "empirical" if likelihood is None else _words(likelihood),
        "graft": str(graft),
        "apply": "backward" if settings.backward else "step",
        "fallback": fallback,
    }


def _words(value: Any) -> str:
    return repr(value) if dataclasses.is_dataclass(value) else type(value).__name__


def checked(
    state_dict: Mapping[str, Any],
    blocks: Mapping[str, Block],
    groups: list[dict[str, Any]],
    own: Mapping[str, str],
    beside: Set[str] = frozenset(),
) -> Mapping[str, Any]:
    """The curvature in a saved state, refused when it belongs to something else.

    `beside`: buffers that the rule of preconditioned layers keeps beside momentum.
    """
    curvature = state_dict.get("curvature") if isinstance(state_dict, Mapping) else None
    if not isinstance(curvature, Mapping) or "format" not in curvature:
        raise ValueError("this is not the state of an rkfac optimizer: no curvature in it")
    if curvature["format"] != STATE_FORMAT:
        raise ValueError(
            f"the state was saved by another version of rkfac (format {curvature['format']}, here {STATE_FORMAT}): load the "
            "model's weights alone and let a new optimizer collect its curvature"
        )
    saved = curvature.get("fingerprint")
    if not isinstance(saved, Mapping) or saved != own:
        theirs = saved if isinstance(saved, Mapping) else {}
        differing = [f"{k}: {theirs.get(k)} saved, {own[k]} here" for k in own if theirs.get(k) != own[k]]
        raise ValueError(f"the saved state belongs to another algorithm: {'; '.join(differing) or 'unknown choices'}")
    missing = blocks.keys() - curvature["blocks"].keys()
    unknown = curvature["blocks"].keys() - blocks.keys()
    if missing or unknown:
        raise ValueError(
            f"the saved state covers other layers: missing {listed(missing)}; unknown {listed(unknown)}. "
            "Build the optimizer with the same model, include= and exclude="
        )
    step, draws, wanted = curvature["step"], curvature["draws"], curvature["wanted"]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (step, draws)):
        raise ValueError(f"the saved state counts {step!r} steps and {draws!r} draws")
    if not isinstance(wanted, list) or not blocks.keys() >= set(wanted):
        raise ValueError(f"the saved state wants statistics of {wanted!r}")
    _check_buffers(groups, state_dict, (ADAM, SGD if own["graft"] != "None" else OWN, beside))
    return curvature


ADAM = {"exp_avg", "exp_avg_sq", "adam_step"}
SGD = {"momentum_buffer", "decay_share"}
OWN = {"momentum_buffer"}
NUMBERS = {"decay_share", "past_lr"}  # floating point, not negative


def _check_buffers(groups: list[dict[str, Any]], state_dict: Mapping[str, Any], kinds: Sequence[Set[str]]) -> None:
    """Refuse buffers that torch would take without a word: of another shape, not finite, incomplete, of nobody."""
    ours = [p for group in groups for p in group["params"]]
    theirs = [index for group in state_dict["param_groups"] for index in group["params"]]
    if any(isinstance(index, bool) or not isinstance(index, int) for index in theirs):
        raise ValueError("the saved groups name parameters by something else than numbers")
    if strangers := state_dict["state"].keys() - set(theirs):
        raise ValueError(f"the saved buffers of {listed(map(str, strangers))} belong to no parameter")
    for p, index in zip(ours, theirs, strict=True):
        buffers = state_dict["state"].get(index, {})
        what = f"of a parameter of shape {tuple(p.shape)}"
        incomplete = any(0 < len(buffers.keys() & whole) < len(whole) for whole in kinds)
        if incomplete or not buffers.keys() <= set().union(*kinds):
            raise ValueError(f"the saved buffers {what} are {listed(buffers)}")
        for key, value in buffers.items():
            if key == "adam_step":
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ValueError(f"{key} {what} is {value!r}")
                continue
            if key in NUMBERS:
                if not isinstance(value, float) or not 0 <= value < math.inf:
                    raise ValueError(f"{key} {what} is {value!r}")
                continue
            if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
                raise ValueError(f"{key} {what} is no tensor of floating point")
            if value.shape != p.shape and not (p.is_complex() and value.shape == (*p.shape, 2)):
                raise ValueError(f"{key} of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}")
            if compat.is_sharded(value) != compat.is_sharded(p):
                own, other = ("sharded", "whole") if compat.is_sharded(value) else ("whole", "sharded")
                raise ValueError(
                    f"{key} {what} is {own} and the parameter {other}: load it with set_optimizer_state_dict of "
                    "torch.distributed.checkpoint, which knows how"
                )
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{key} {what} holds NaN or Inf")


@contextmanager
def all_or_nothing(optimizer: Any, blocks: Mapping[str, Block], rewind: Callable[[], None]) -> Iterator[None]:
    """Put optimizer and blocks back as they were when loading fails half-way, whatever the damage."""
    # Loading replaces tensors and factors and changes none in place, so that references to the old ones are enough.
    before = {name: dict(vars(block)) for name, block in blocks.items()}
    state, groups = optimizer.state, optimizer.param_groups
    try:
        yield
    except Exception as error:
        rewind()
        optimizer.state, optimizer.param_groups = state, groups
        for name, block in blocks.items():
            vars(block).update(before[name])
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the saved state does not fit this optimizer: {why}") from error

"""Resuming: what a saved state must look like, and loading that changes everything or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block
from rkfac.optim.report import listed

STATE_FORMAT = 1


def checked(
    state_dict: Mapping[str, Any], blocks: Mapping[str, Block], groups: list[dict[str, Any]]
) -> Mapping[str, Any]:
    """The curvature in a saved state, refused when it belongs to something else."""
    curvature = state_dict.get("curvature")
    if not isinstance(curvature, Mapping) or curvature.get("format") != STATE_FORMAT:
        raise ValueError(f"this is not the state of an rkfac optimizer (format {STATE_FORMAT}): no curvature in it")
    missing = blocks.keys() - curvature["blocks"].keys()
    unknown = curvature["blocks"].keys() - blocks.keys()
    if missing or unknown:
        raise ValueError(
            f"the saved state covers other layers: missing {listed(missing)}; unknown {listed(unknown)}. "
            "Build the optimizer with the same model, include= and exclude="
        )
    _check_buffers(groups, state_dict)
    return curvature


def _check_buffers(groups: list[dict[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Refuse momentum and the like of another shape than its parameter, which torch would take without a word."""
    ours = [p for group in groups for p in group["params"]]
    theirs = [index for group in state_dict.get("param_groups", ()) for index in group["params"]]
    for p, index in zip(ours, theirs, strict=False):
        for key, value in state_dict.get("state", {}).get(index, {}).items():
            if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                raise ValueError(
                    f"the saved state does not fit this model: {key} of shape {tuple(value.shape)} for a parameter of "
                    f"shape {tuple(p.shape)}"
                )


@contextmanager
def all_or_nothing(blocks: Mapping[str, Block], generator: torch.Generator) -> Iterator[None]:
    """Put blocks and generator back as they were when loading fails half-way."""
    # Loading replaces a block's tensors and changes none, so that references to the old ones are enough.
    before = {
        name: {key: list(value) if isinstance(value, list) else value for key, value in vars(block).items()}
        for name, block in blocks.items()
    }
    drawn = generator.get_state()
    try:
        yield
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        generator.set_state(drawn)
        for name, block in blocks.items():
            vars(block).update(before[name])
        raise ValueError(f"the saved state does not fit this model: {error}") from error

"""What the shell refuses before anything is touched: what does not work with other processes, shards or kinds of gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from rkfac import compat
from rkfac.curvature.block import Block


def refuse_alone(name: str, blocks: Collection[Block], seeded: bool, size: int) -> None:
    """Members and settings that know of one process alone, by name."""
    if not all(block.addable for block in blocks):
        raise ValueError(
            f"{name} cannot train with {size} processes: what it keeps of a batch does not add up over processes. "
            "Use KFAC, RSKFAC, SREKFAC or EKFAC, or say process_group=False to train in each process by itself"
        )
    if not seeded:
        raise ValueError(f"generator= is one process's own: give {name} a seed= to train with {size} processes")


def refuse_spread(name: str, model: nn.Module, parameters: Collection[nn.Parameter], asked: Mapping[str, bool]) -> None:
    """What is `asked` for and needs whole parameters, where these are sharded."""
    whole = compat.stand_ins(model)
    if any(id(p) in whole for p in parameters):
        raise ValueError(
            "params= holds parameters that stand in the place of sharded ones while the model runs: ask the model for them "
            "again, before its forward or after model.reshard()"
        )
    if not any(map(compat.is_sharded, parameters)):
        return
    for what in (setting for setting, wanted in asked.items() if wanted):
        raise ValueError(
            f"{name} cannot train a sharded model with {what}: no process has a whole gradient of every "
            "layer. Use KFAC, RSKFAC, SREKFAC or EKFAC without it, or DistributedDataParallel"
        )


def refuse_gradients(parameters: Collection[nn.Parameter], scaler: Any) -> None:
    """Sparse ones; those of a scaler, where each process would find infinities in its own rows and skip steps by itself."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise RuntimeError("sparse gradients are not supported: build nn.Embedding with sparse=False")
    if scaler is not None and any(map(compat.is_sharded, parameters)):
        raise RuntimeError(
            "a GradScaler is not supported with a sharded model: train in bfloat16 (fully_shard's mp_policy=) instead"
        )

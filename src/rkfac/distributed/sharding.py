"""Which sharded models can be trained: those of fully_shard, whose parameters are cut into rows over one line of processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import distributed, nn

from rkfac import compat


def refuse_sharded(model: nn.Module, known: Collection[int] | None = None) -> None:
    """Refuse what cuts parameters or layers in any other way, by name, and nn.DataParallel.

    `known`: identities of the parameters that an optimizer was built for; others have come in their place.
    """
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ValueError(
            "nn.DataParallel is not supported: it runs copies of the layers; pass model.module on one device"
        )
    meshes: dict[int, Any] = {}
    sharded = [(name, p) for name, p in model.named_parameters() if compat.is_sharded(p)]
    by_rows = compat.fully_sharded(model) if sharded else {}
    for name, p in sharded:
        if not any(name.startswith(prefix) for prefix in by_rows):
            raise ValueError(
                f"parameter {name!r} is a DTensor that fully_shard has not made of this model (tensor parallel, or a part of a "
                "sharded model), which is not supported: use fully_shard or DistributedDataParallel, and give the whole model"
            )
        mesh, placements = compat.layout(p)
        if mesh.ndim != 1 or placements != ["rows"]:
            raise ValueError(
                f"parameter {name!r} is cut as {placements} over {mesh.ndim} dimensions of processes (HSDP, tensor parallel, "
                "or a shard_placement_fn of your own), which is not supported: use fully_shard with its defaults over one "
                "dimension of processes"
            )
        meshes.setdefault(id(mesh), mesh)
        if len({tuple(each.mesh.tolist()) for each in meshes.values()}) > 1:
            raise ValueError(f"parameter {name!r} is sharded over other processes than the parameters before it")
        if known is not None and id(p) not in known:
            raise ValueError(
                f"parameter {name!r} was sharded after the optimizer was built, which holds the one before: call fully_shard "
                "first, then build the optimizer"
            )
    if sharded and compat.averaged_otherwise(model):
        raise ValueError(
            "set_gradient_divide_factor is not supported: statistics take gradients for means over the processes, as fully_shard "
            "makes them"
        )
    for name, p in model.named_parameters():
        if type(p).__name__ == "FlatParameter":
            raise ValueError(
                f"parameter {name!r} is sharded by FullyShardedDataParallel, which is not supported: use fully_shard"
            )


def cut_again(model: nn.Module) -> None:
    """Let sharded parameters stand in their places: a forward without a backward pass leaves whole ones there."""
    for module in compat.fully_sharded(model).values():
        module.reshard()


def group_of_shards(model: nn.Module, group: Any) -> Any:
    """The process group that a model is sharded over, which `group` must not contradict; `group` where it is not sharded."""
    sharded = next((p for p in model.parameters() if compat.is_sharded(p)), None)
    if sharded is None:
        return group
    if group is False:
        raise ValueError("process_group=False: this model is sharded, and no process can train its rows by itself")
    spread = compat.layout(sharded)[0].get_group()
    ranks = distributed.get_process_group_ranks
    if group is not None and ranks(group) != ranks(spread):
        raise ValueError("process_group= is another group than the one that the model is sharded over")
    return spread

"""Which layers of a model get a block of curvature, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from rkfac.curvature.block import Block, Settings
from rkfac.curvature.kronecker_block import KroneckerBlock
from rkfac.curvature.unit_block import UnitBlock
from rkfac.layers import KroneckerAdapter, Uncovered, UnitAdapter, adapter_for


@dataclass
class Coverage:
    """Blocks by module name, and the reason for every other module that owns parameters."""

    blocks: dict[str, Block] = field(default_factory=dict)
    reasons: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, without torch.compile's or DistributedDataParallel's wrapper."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def cover(
    model: nn.Module,
    settings: Settings,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    max_factor_dim: int,
    optimized: Iterable[nn.Parameter],
    covered: Collection[str] = (),
) -> Coverage:
    """Give every module that owns parameters a block or a reason, apart from those covered already."""
    ids = {id(p) for p in optimized}
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = Coverage()
    silent: set[int] = set()  # children whose parameters are used without calling them
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            silent.update(id(child) for child in module.modules() if child is not module)
        own = [p for p in module._parameters.values() if p is not None]
        if not own or name in covered:
            continue
        chosen = _choose(name, module, own, ids, owners, include, exclude, silent)
        if isinstance(chosen, str):
            found.reasons[name] = (module, chosen)
        elif isinstance(chosen, UnitAdapter):
            found.blocks[name] = UnitBlock(name, module, chosen, settings)
        else:
            dims = (*chosen.input_shape(module, chosen.has_bias(module))[-1:], *chosen.output_shape(module)[-1:])
            widest = dims[1] if chosen.diagonal_input() else max(dims)
            if widest > max_factor_dim:
                reason = f"a factor would be {widest} x {widest} ({4e-9 * widest**2:.1f} GB); raise max_factor_dim to allow it"
                found.reasons[name] = (module, reason)
            else:
                found.blocks[name] = KroneckerBlock(name, module, chosen, settings)
    for pattern in include:
        if not any(_matches(name, module, (pattern,)) for name, module in model.named_modules()):
            raise ValueError(f"include={pattern!r} matches no module of the model, by name or by class")
    return found


def _choose(
    name: str,
    module: nn.Module,
    own: list[nn.Parameter],
    ids: set[int],
    owners: Counter[int],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    silent: set[int],
) -> KroneckerAdapter | UnitAdapter | str:
    """The adapter for a module, or the reason why it stays with the fallback rule."""
    if id(module) in silent:
        return "nn.MultiheadAttention uses its weights without calling it; build attention from nn.Linear to cover it"
    if include and not _matches(name, module, include):
        return "not among the included patterns"
    if _matches(name, module, exclude):
        return "excluded by pattern"
    adapter = adapter_for(module)
    if isinstance(adapter, Uncovered):
        return adapter.reason
    if any(owners[id(p)] > 1 for p in own):
        return "its weight is tied to another module's"
    weight = module._parameters["weight"]
    if id(weight) not in ids:
        return "its weight is not among the optimizer's parameters"
    if weight is not None and weight.is_complex():
        return "complex weights are not supported"
    if isinstance(adapter, KroneckerAdapter | UnitAdapter):
        return adapter
    return f"no block for {type(adapter).__name__}"


def _matches(name: str, module: nn.Module, patterns: tuple[str, ...]) -> bool:
    """A pattern names modules by their path or by their class."""
    return any(fnmatchcase(name, p) or fnmatchcase(type(module).__name__, p) for p in patterns)


def refuse_sharded(model: nn.Module) -> None:
    """Sharded parameters are refused by name: a block needs the whole weight of its layer."""
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "FlatParameter":
            raise ValueError(f"parameter {name!r} is sharded (FSDP / DTensor), which is not supported")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError(
            f"{torch.distributed.get_world_size()} processes: statistics are not shared between processes yet, so that "
            "replicas would drift apart; train in one process"
        )

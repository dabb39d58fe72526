"""Which layers of a model get a block of curvature, and why the others do not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from rkfac.curvature.block import Block
from rkfac.layers import Adapter, Uncovered, adapter_for, known_classes, own_parameters

MakeBlock = Callable[[str, nn.Module, Adapter], Block | str]


@dataclass
class Coverage:
    """Blocks by module name, and the reason for every other module that owns parameters."""

    blocks: dict[str, Block] = field(default_factory=dict)
    reasons: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Which layers a user wants preconditioned: patterns of module names or classes, and the widest factor."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    max_factor_dim: int

    def check(self, model: nn.Module) -> None:
        """Refuse a pattern that matches nothing: it is misspelt."""
        for argument, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                # A preset may exclude kinds of layers that this model has none of.
                known = argument == "exclude" and any(fnmatchcase(name, pattern) for name in known_classes())
                if not known and not any(_matches(name, module, (pattern,)) for name, module in model.named_modules()):
                    raise ValueError(f"{argument}={pattern!r} matches no module of the model, by name or by class")

    def refusal(self, name: str, module: nn.Module) -> str:
        """Why a module was not chosen, or an empty string."""
        if self.include and not _matches(name, module, self.include):
            return "not among the included patterns"
        return "excluded by pattern" if _matches(name, module, self.exclude) else ""

    def too_wide(self, widest: int) -> str:
        """Why a layer whose widest factor is a matrix of this width gets no block, or an empty string."""
        if widest <= self.max_factor_dim:
            return ""
        return f"a factor would be {widest} x {widest} ({4e-9 * widest**2:.1f} GB); raise max_factor_dim to allow it"


def cover(
    model: nn.Module,
    choice: Choice,
    make: MakeBlock,
    optimized: Iterable[nn.Parameter],
    covered: Collection[str] = (),
) -> Coverage:
    """Give every module that owns parameters a block or a reason, apart from those covered already."""
    ids = {id(p) for p in optimized}
    owners = owners_of(model)
    found = Coverage()
    silent: set[int] = set()  # children whose parameters are used without calling them
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            silent.update(id(child) for child in module.modules() if child is not module)
        own = own_parameters(module)
        if not own or name in covered:
            continue
        adapter = adapter_for(module)
        if id(module) in silent:
            reason = (
                "nn.MultiheadAttention uses its weights without calling it; build attention from nn.Linear to cover it"
            )
        elif isinstance(adapter, Uncovered):
            reason = choice.refusal(name, module) or adapter.reason
        else:
            reason = choice.refusal(name, module) or _unfit(own, ids, owners)
        made = reason if reason or isinstance(adapter, Uncovered) else make(name, module, adapter)
        if isinstance(made, Block):
            found.blocks[name] = made
        else:
            found.reasons[name] = (module, made)
    return found


def _unfit(own: dict[str, nn.Parameter], ids: set[int], owners: Counter[int]) -> str:
    """Why a module with an adapter stays with the fallback rule, or an empty string."""
    if any(owners[id(p)] > 1 for p in own.values()):
        return "its weight is tied to another module's"
    if id(own["weight"]) not in ids:
        return "its weight is not among the optimizer's parameters"
    if own["weight"].is_complex():
        return "complex weights are not supported"
    return ""


def owners_of(model: nn.Module) -> Counter[int]:
    """How many modules own each parameter, by its identity."""
    return Counter(id(p) for m in model.modules() for p in own_parameters(m).values())


def _matches(name: str, module: nn.Module, patterns: tuple[str, ...]) -> bool:
    """A pattern names modules by their path or by their class."""
    return any(fnmatchcase(name, p) or fnmatchcase(type(module).__name__, p) for p in patterns)


def warn_of_little(blocks: dict[str, Block], reasons: dict[str, tuple[nn.Module, str]], stacklevel: int) -> None:
    """One warning when less than half of the trained parameters are preconditioned."""
    covered = sum(p.numel() for b in blocks.values() if b.weight.requires_grad for p in b.parameters)
    left = [(_trained(module), name, reason) for name, (module, reason) in reasons.items()]
    left += [
        (_trained(b.module), b.name, "its weight is frozen") for b in blocks.values() if not b.weight.requires_grad
    ]
    left = [entry for entry in left if entry[0]]
    total = covered + sum(count for count, _, _ in left)
    if not total or covered >= total / 2:
        return
    largest = "; ".join(f"{name!r} ({count:,}): {reason}" for count, name, reason in sorted(left, reverse=True)[:3])
    warnings.warn(
        f"only {covered:,} of {total:,} trained parameters are preconditioned, the others train by the fallback rule. "
        f"The largest left out: {largest}",
        stacklevel=stacklevel,
    )


def _trained(module: nn.Module) -> int:
    own = own_parameters(module).values()
    return sum(p.numel() for p in own if p.requires_grad and not isinstance(p, UninitializedParameter))


def refuse_sharded(model: nn.Module) -> None:
    """Sharded parameters and nn.DataParallel are refused by name: a block needs its layer's whole weight and batch."""
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "FlatParameter":
            raise ValueError(f"parameter {name!r} is sharded (FSDP / DTensor), which is not supported")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ValueError(
            "nn.DataParallel is not supported: it runs copies of the layers; pass model.module on one device"
        )


def refuse_processes() -> None:
    """Several processes are refused whenever they appear: their statistics are not shared yet."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            f"{distributed.get_world_size()} processes: statistics are not shared between processes yet, so that "
            "replicas would drift apart; train in one process"
        )

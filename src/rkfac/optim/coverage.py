"""Which layers of a model get a block of curvature, and why the others do not."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from rkfac import compat
from rkfac.curvature.block import Block, Settings
from rkfac.layers import (
    Adapter,
    Uncovered,
    Use,
    is_container,
    known_classes,
    own_parameters,
    together,
    uses_of,
)
from rkfac.layers.embedding import EmbeddingAdapter

MakeBlock = Callable[[Sequence[Use], Adapter], Block | Uncovered]


@dataclass(frozen=True)
class LeftOut:
    """Parameters of one module without a block, and why: they train by the fallback rule if a group holds them."""

    kind: str
    parameters: tuple[nn.Parameter, ...]
    reason: str


@dataclass
class Coverage:
    """New blocks by name, the reason for every parameter without a block, and all layers' names in the model's order."""

    blocks: dict[str, Block] = field(default_factory=dict)
    reasons: dict[str, LeftOut] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


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

    def refusal(self, name: str, *modules: nn.Module) -> str:
        """Why a layer was not chosen by its name or by the class of any of these, or an empty string."""
        if self.include and not any(_matches(name, module, self.include) for module in modules):
            return "not among the included patterns"
        return "excluded by pattern" if any(_matches(name, module, self.exclude) for module in modules) else ""

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
    covered: Mapping[str, Block],
) -> Coverage:
    """Give every parameter a block or a reason, apart from what is covered already."""
    ids, owners = {id(p) for p in optimized}, owners_of(model)
    uses, reasons = _uses(model)
    by_weight: dict[int, list[Use]] = {}
    for use in uses:
        by_weight.setdefault(id(use.weight), []).append(use)
    found = Coverage()
    for shared in by_weight.values():
        # Tables before heads: the first one gives the block its name.
        shared.sort(key=lambda use: not isinstance(use.adapter, EmbeddingAdapter))
        name, adapter = shared[0].name, together(shared)
        found.order.append(name)
        if name in covered:
            continue
        refused = (choice.refusal(use.name, use.module, use.called) for use in shared)
        reason = next(filter(None, refused), "")
        made: Block | Uncovered = Uncovered(reason) if reason else _made(adapter, shared, make, ids, owners)
        if isinstance(made, Block):
            found.blocks[name] = made
        else:
            reasons.update((use.name, made.reason) for use in shared)
    found.reasons = _left_out(model, [*covered.values(), *found.blocks.values()], reasons, choice)
    return found


def block_for(
    uses: Sequence[Use],
    adapter: Adapter,
    block_types: Mapping[type, Callable[..., Block | str]],
    settings: Settings,
    asker: str,
) -> Block | Uncovered:
    """The block that serves a kind of layer, or why none does; `asker` is who has these kinds of blocks."""
    for kind in type(adapter).__mro__[: 1 if adapter.unlike_its_ancestors else None]:
        if kind in block_types:
            made = block_types[kind](uses, adapter, settings)
            return Uncovered(made) if isinstance(made, str) else made
    kinds = sorted({compat.kind_of(use.module).__name__ for use in uses})
    what = kinds[0] if len(kinds) == 1 else f"a weight that {' and '.join(kinds)} share"
    return Uncovered(f"{asker} has no curvature for {what}")


def _made(
    adapter: Adapter | Uncovered,
    uses: Sequence[Use],
    make: MakeBlock,
    ids: set[int],
    owners: Counter[int],
) -> Block | Uncovered:
    """A weight's block, if it can have one."""
    if isinstance(adapter, Uncovered):
        return adapter
    reason = _unfit(adapter, uses, ids, owners)
    return Uncovered(reason) if reason else make(uses, adapter)


def _uses(model: nn.Module) -> tuple[list[Use], dict[str, str]]:
    """All uses of weights in the model's order, and the reasons why modules have none."""
    uses: list[Use] = []
    reasons: dict[str, str] = {}
    silent: dict[int, str] = {}  # children whose parameters are used without calling them
    for name, module in model.named_modules():
        if not own_parameters(module) and not is_container(module):
            continue
        if id(module) in silent:
            reasons.setdefault(name, silent[id(module)])
            continue
        found = uses_of(name, module)
        if is_container(module):
            why = next((u.reason for u in found.values() if isinstance(u, Uncovered)), "")
            text = why or f"{compat.kind_of(module).__name__} uses its weights without calling it"
            silent.update((id(child), text) for child in module.modules() if child is not module)
        uses += [use for use in found.values() if isinstance(use, Use)]
        reasons |= {full: use.reason for full, use in found.items() if isinstance(use, Uncovered)}
    return uses, reasons


def _left_out(
    model: nn.Module, blocks: Sequence[Block], reasons: Mapping[str, str], choice: Choice
) -> dict[str, LeftOut]:
    """What no block owns: whole modules by their name, single parameters of the others by their own."""
    owned = {id(p) for block in blocks for p in block.owned}
    partly = {id(use.module): block for block in blocks for use in block.uses}
    found: dict[str, LeftOut] = {}
    counted: set[int] = set()  # what several modules own counts with the first of them
    for name, module in model.named_modules():
        own = own_parameters(module)
        rest = {key: p for key, p in own.items() if id(p) not in owned}
        block = partly.get(id(module))
        if block is not None and not block.tied and block.uses[0].within is None:
            adapter = block.uses[0].adapter
            # A weight in another's place is its block's trouble.
            rest = {key: p for key, p in rest.items() if key not in (adapter.weight_name, adapter.bias_name)}
        if not rest:
            continue
        new = {key: p for key, p in rest.items() if id(p) not in counted}
        counted.update(map(id, new.values()))
        if block is None and not any(f"{name}.{key}".removeprefix(".") in reasons for key in rest):
            reason = choice.refusal(name, module) or reasons[name]
            found[name] = LeftOut(compat.kind_of(module).__name__, tuple(new.values()), reason)
            continue
        for key, p in new.items():
            full = f"{name}.{key}".removeprefix(".")
            why = reasons.get(full) or _beside(block, key, compat.kind_of(module).__name__)
            found[full] = LeftOut(compat.kind_of(module).__name__, (p,), why)
    return found


def _beside(block: Block | None, key: str, kind: str) -> str:
    """Why a parameter takes no part in a block that its module has."""
    if block is not None and block.tied:
        return f"its weight is preconditioned with that of {block.name!r}, and no bias takes part in that"
    if block is None or block.uses[0].within is not None:
        return f"{key} of {kind} is not a part of one projection"
    return f"{key} of {kind} takes no part in what its adapter knows of, {block.uses[0].adapter.weight_name}"


def _unfit(adapter: Adapter, uses: Sequence[Use], ids: set[int], owners: Counter[int]) -> str:
    """Why a weight with an adapter stays with the fallback rule, or an empty string."""
    module, weight = uses[0].module, uses[0].weight
    if owners[id(weight)] > len(uses):
        return "its weight is tied to another module's"
    bias = adapter.bias(module)
    if len(uses) == 1 and bias is not None and owners[id(bias)] > 1:
        return "its bias is tied to another module's"
    if id(weight) not in ids:
        return "its weight is not among the optimizer's parameters"
    if weight.is_complex():
        return "complex weights are not supported"
    return ""


def owners_of(model: nn.Module) -> Counter[int]:
    """How many modules own each parameter, by its identity."""
    return Counter(id(p) for m in model.modules() for p in own_parameters(m).values())


def _matches(name: str, module: nn.Module, patterns: tuple[str, ...]) -> bool:
    """A pattern names modules by their path or by their class."""
    return any(fnmatchcase(name, p) or fnmatchcase(compat.kind_of(module).__name__, p) for p in patterns)


def warn_of_little(blocks: dict[str, Block], reasons: Mapping[str, LeftOut], held: Collection[int]) -> None:
    """One warning when less than half of the trained parameters, which groups hold, are preconditioned."""

    def trained(own: Iterable[nn.Parameter]) -> int:
        return _trained(p for p in own if id(p) in held)

    covered = sum(trained(b.parameters) for b in blocks.values() if b.weight.requires_grad)
    left = [(trained(entry.parameters), name, entry.reason) for name, entry in reasons.items()]
    left += [(trained(b.owned), b.name, "its weight is frozen") for b in blocks.values() if not b.weight.requires_grad]
    left = [entry for entry in left if entry[0]]
    total = covered + sum(count for count, _, _ in left)
    if not total or covered >= total / 2:
        return
    largest = "; ".join(f"{name!r} ({count:,}): {reason}" for count, name, reason in sorted(left, reverse=True)[:3])
    warnings.warn(
        f"only {covered:,} of {total:,} trained parameters are preconditioned, the others train by the fallback rule. "
        f"The largest left out: {largest}",
        stacklevel=_builder(),
    )


def _builder() -> int:
    """Frames from a warning to the line that builds the optimizer, however many constructors lie between."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rkfac."):
        level, frame = level + 1, frame.f_back
    return level


def _trained(own: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in own if p.requires_grad and not isinstance(p, UninitializedParameter))

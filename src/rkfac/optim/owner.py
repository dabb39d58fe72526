"""Whose parameters these are: what stands in the first place of a constructor may be a model or parameters of one."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

ADVICE = "write the model in the place of its parameters, or build rkfac.for_model(model)(parameters, ...)"


def model_of(
    given: Any, params: Iterable[Any] | None, kind: str = "the optimizer"
) -> tuple[nn.Module, list[Any] | Iterable[Any] | None]:
    """The model to train and what `params=` says, from a model or from parameters as torch's optimizers take them."""
    if isinstance(given, nn.Module):
        return given, params
    if given is None and params is None:
        raise TypeError(f"{kind} needs a model, or parameters of one: {kind}(model, lr=...)")
    if given is not None and params is not None:
        raise ValueError(f"model must be an nn.Module where params= is given, got {type(given).__name__}")
    given = params if given is None else given
    asked, groups = _asked(given), listed_groups(given)
    return _holder(members(groups), asked), groups


def listed_groups(params: Any) -> list[Any]:
    """Parameters, named ones or groups of either as torch takes them, with lists in the place of iterators."""
    if isinstance(params, Tensor | str | dict) or not isinstance(params, Iterable):
        raise ValueError(f"model must be an nn.Module or parameters of one, got {type(params).__name__}")
    return [{**one, "params": _listed(one["params"])} if isinstance(one, dict) else one for one in params]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def members(groups: Iterable[Any]) -> list[Tensor]:
    """The parameters in what `listed_groups` returns."""
    found: list[Tensor] = []
    for one in groups:
        if isinstance(one, dict):
            found += members(one["params"])
        elif isinstance(one, tuple):
            found += one[1:]
        else:
            found.append(one)
    for p in found:
        if not isinstance(p, Tensor):
            raise ValueError(f"model must be an nn.Module or parameters of one, got an iterable of {type(p).__name__}")
    return found


def _asked(params: Any) -> nn.Module | None:
    """The module whose `parameters()` or `named_parameters()` is being handed over, if it is."""
    frame = getattr(params, "gi_frame", None)
    if frame is None or frame.f_code.co_name not in ("parameters", "named_parameters"):
        return None
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _holder(parameters: list[Tensor], asked: nn.Module | None) -> nn.Module:
    """The outermost module there is that has all of these parameters; parameters do not know it, so all modules are asked.

    `asked`: a module that is known to have them. It need not be the outermost one, whose output is what a model returns.
    """
    if not parameters:
        raise ValueError("model must be an nn.Module or parameters of one, got an empty list")
    found = _holders(parameters)
    if len(found) > 1:
        del found
        gc.collect()  # what nobody has any more may still be there
        found = _holders(parameters)
    if len(found) == 1:
        return found[0]
    if asked is not None and all(sum(1 for _ in one.parameters()) == len(parameters) for one in found):
        return asked  # with several wrappers around it that add nothing
    if not found:
        raise ValueError(f"no module has all of these {len(parameters)} parameters: {ADVICE}")
    kinds = ", ".join(sorted(type(model).__name__ for model in found))
    raise ValueError(f"these parameters are those of {len(found)} models ({kinds}): {ADVICE}")


def _holders(parameters: list[Tensor]) -> list[nn.Module]:
    wanted = {id(p) for p in parameters}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in vars(one)]
    inner = {id(child) for module in modules for child in vars(module)["_modules"].values()}
    roots = [module for module in modules if id(module) not in inner]
    return [module for module in roots if wanted <= {id(p) for p in module.parameters()}]

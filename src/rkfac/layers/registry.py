"""Which adapter serves which module: the registry, what is recognised without it, and why a module is not served."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from rkfac import compat
from rkfac.layers.base import NOT_PLAIN, Adapter, Container, KroneckerAdapter, Uncovered, UnitAdapter, Use, Within

Recogniser = Callable[[nn.Module], Adapter | Uncovered | None]

_REGISTRY: dict[type[nn.Module], Adapter | Container] = {}
_RECOGNISERS: list[Recogniser] = []
A = TypeVar("A", bound=type[Adapter] | type[Container])


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters by name, those of its children left out."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def recognises(recogniser: Recogniser) -> Recogniser:
    """Decorator: this function knows modules of libraries that are not imported here; None: not this one."""
    _RECOGNISERS.append(recogniser)
    return recogniser


def register(*modules: type[nn.Module]) -> Callable[[A], A]:
    """Class decorator: this adapter serves these module classes, in every optimizer that is built from now on.

    A subclass of `rkfac.layers.ProductAdapter`, `ScaleAdapter`, `KroneckerAdapter` or `UnitAdapter`, which needs no
    arguments. The nearest ancestor that is registered serves a module, as long as the module has kept that ancestor's
    forward: a subclass of nn.Linear with a forward of its own wants to be registered itself. Of two adapters for one class
    the later counts. `rkfac.testing.check_adapter` compares an adapter with autograd.
    """
    if not modules:
        raise TypeError("register needs the module classes to serve: @rkfac.register(MyLayer)")
    for module in modules:
        _check_module(module)

    def enrol(adapter: A) -> A:
        made = _made(adapter)
        _REGISTRY.update(dict.fromkeys(modules, made))
        return adapter

    return enrol


def _check_module(module: Any) -> None:
    if isinstance(module, nn.Module):
        raise TypeError(
            f"register takes classes, and this is a {type(module).__name__}: register {type(module).__name__}"
        )
    if not inspect.isclass(module) or not issubclass(module, nn.Module) or module is nn.Module:
        said = module.__name__ if inspect.isclass(module) else repr(module)
        raise TypeError(f"register takes subclasses of nn.Module, not {said}: @rkfac.register(MyLayer)")


def _made(adapter: Any) -> Adapter | Container:
    """One of this class, or why there is none."""
    if not inspect.isclass(adapter) or not issubclass(adapter, KroneckerAdapter | UnitAdapter | Container):
        said = adapter.__name__ if inspect.isclass(adapter) else repr(adapter)
        raise TypeError(
            f"{said} is no adapter: derive a class from rkfac.layers.ProductAdapter, ScaleAdapter, KroneckerAdapter or "
            "UnitAdapter"
        )
    if missing := sorted(adapter.__abstractmethods__):
        raise TypeError(
            f"{adapter.__name__} lacks {', '.join(missing)}: define what is missing, or derive it from "
            "rkfac.layers.ProductAdapter or ScaleAdapter, which lack nothing"
        )
    try:
        return adapter()
    except TypeError as error:
        raise TypeError(f"{adapter.__name__} must be made without arguments: {error}") from error


def uses_of(name: str, module: nn.Module) -> dict[str, Use | Uncovered]:
    """What a module of this name uses, by name: itself, or all that it uses in the place of its children's calls."""
    served = _served(module)
    if not isinstance(served, Container):
        return {name: served if isinstance(served, Uncovered) else Use(name, module, served)}
    within, found = Within(module, served), dict[str, Use | Uncovered]()
    for inner, (owner, adapter) in served.inner(module).items():
        full = ".".join(part for part in (name, inner) if part)
        plain = adapter.plain_weight(owner) is not None
        found[full] = Use(full, owner, adapter, within) if plain else NOT_PLAIN
    return found


def adapter_for(module: nn.Module) -> Adapter | Uncovered:
    """The adapter that serves a module's calls, or the reason why none does."""
    served = _served(module)
    return Uncovered(f"no adapter for {compat.kind_of(module).__name__}") if isinstance(served, Container) else served


def _served(module: nn.Module) -> Adapter | Container | Uncovered:
    """A subclass is served only if it kept its ancestor's `forward`; one with a forward of its own may mean anything."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in own_parameters(module).values()):
        return Uncovered("its parameters are not initialised yet: run one forward before building the optimizer")
    base = _registered(module)
    if base is not None:
        adapter = _REGISTRY[base]
        if reason := overridden(module, base):
            return Uncovered(reason)
        if isinstance(adapter, Container):
            return adapter
        if adapter.plain_weight(module) is None:
            return NOT_PLAIN
        reason = adapter.refusal(module)
        return Uncovered(reason) if reason else adapter
    for recogniser in _RECOGNISERS:
        found = recogniser(module)
        if found is not None:
            return found
    return Uncovered(f"no adapter for {compat.kind_of(module).__name__}")


def _registered(module: nn.Module) -> type[nn.Module] | None:
    """The nearest class of a module that an adapter is registered for."""
    return next((kind for kind in type(module).__mro__ if kind in _REGISTRY), None)


def overridden(module: nn.Module, base: type[nn.Module]) -> str:
    """Which method of its ancestor a module has replaced, as a reason, or an empty string."""
    for method in ("forward", "_conv_forward"):  # the second is what a convolution's forward calls
        own = module.__dict__.get(method, getattr(type(module), method, None))
        if own is not getattr(base, method, None):
            return f"{compat.kind_of(module).__name__} overrides {method} of {base.__name__}"
    return ""


def is_container(module: nn.Module) -> bool:
    """Whether a module is of a class that uses its children's weights without calling them, covered or not."""
    base = _registered(module)
    return base is not None and isinstance(_REGISTRY[base], Container)


def known_classes() -> tuple[str, ...]:
    """Names of the module classes the registry knows."""
    return tuple(kind.__name__ for kind in _REGISTRY)

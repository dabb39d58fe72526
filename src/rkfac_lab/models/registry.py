"""The registry of networks: one decorator to add, one function to build by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import unknown

Factory = Callable[..., nn.Module]
_factories: dict[str, Factory] = {}


def model(name: str) -> Callable[[Factory], Factory]:
    """Register the decorated factory under `name`."""

    def enrol(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return enrol


def build(name: str, **arguments: Any) -> nn.Module:
    """The network registered under `name`, freshly initialised from torch's global generator."""
    if name not in _factories:
        raise unknown("model", name, _factories)
    return _factories[name](**arguments)


def names() -> list[str]:
    """All registered names."""
    return sorted(_factories)

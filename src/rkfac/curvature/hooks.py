"""What every hook of the package has in common, and the small things hooks need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

BROKEN_GRAPH = (
    "rkfac collects statistics here. Hand the compiled model to the optimizer, RSKFAC(torch.compile(model), ...): it then "
    "runs statistics steps without the graph and leaves all others whole"
)


class Removable(Protocol):
    """A hook that is in place."""

    def remove(self) -> None:
        """Take it out."""


class _Inert:
    """What a hook becomes in a copied or unpickled model: nothing. The copy is not the model being optimized."""

    def __call__(self, *_: Any) -> None:
        return None


class NotScriptableError(AttributeError):
    """torch.jit.script compiles a model's hooks, and these are not for it."""


class Hook:
    """A hook that does not travel with copies of the model."""

    def __init__(self, capture: Any) -> None:
        self.capture = capture

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()

    @property
    def __name__(self) -> str:
        """Asked for by torch.jit.script alone."""
        raise NotScriptableError(
            "a model cannot be scripted while an rkfac optimizer watches it: script it inside "
            "`with optimizer.unhooked():`, or after optimizer.close()"
        )


@contextmanager
def full_precision(devices: Iterable[torch.device]) -> Iterator[None]:
    """No autocast: curvature is computed in float32 or better also when the whole step stands inside an autocast."""
    with ExitStack() as stack:
        for kind in {device.type for device in devices}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    """The first tensor among arguments, one level inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for item in inner:
            if isinstance(item, Tensor):
                return item
    return None

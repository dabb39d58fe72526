"""Optimizers for programs that build `optimizer_class(params, **keywords)`, and the optimizer inside what they made of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar, overload

from torch import nn

from rkfac.optim.kfac import KFAC, RSKFAC
from rkfac.optim.owner import listed_groups, members

Kind = TypeVar("Kind", bound=KFAC)


@overload
def for_model(model: nn.Module) -> type[RSKFAC]: ...


@overload
def for_model(model: nn.Module, kind: type[Kind]) -> type[Kind]: ...


def for_model(model: nn.Module, kind: type[KFAC] = RSKFAC) -> type[KFAC]:
    """A class that is built as torch's own optimizers are, `(params, lr=..., ...)`, and trains this model.

    `params` are parameters of the model, named or not, groups of them, or the model itself. Parameters of another model are
    refused: `kind(model, params=...)` takes those too, and trains them by the fallback rule.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if not (isinstance(kind, type) and issubclass(kind, KFAC)):
        raise ValueError(f"kind must be an optimizer class such as rkfac.RSKFAC, got {kind!r}")

    def construct(self: Any, params: Any, lr: float | None = None, **keywords: Any) -> None:
        groups = None if params is model else listed_groups(params)
        _refuse_foreign(model, groups)
        kind.__init__(self, model, lr, params=groups, **keywords)

    construct.__qualname__ = f"{kind.__name__}.__init__"  # as errors call it
    known = inspect.signature(kind.__init__).parameters
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown = [first if name == "model" else p for name, p in known.items() if name != "params"]
    construct.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__init__": construct, "__doc__": kind.__doc__, "__module__": kind.__module__})


def _refuse_foreign(model: nn.Module, groups: Iterable[Any] | None) -> None:
    given, own = members(groups or ()), {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in own for p in given)
    if foreign:
        raise ValueError(
            f"{foreign} of {len(given)} parameters are not those of the {type(model).__name__} that for_model() was given: "
            "call it with the model that is trained"
        )


def unwrap(optimizer: Any) -> KFAC:
    """The optimizer of this package inside of a wrapper that hides `report()` and the like (Accelerate's, the Trainer's)."""
    found, seen = optimizer, {id(optimizer)}
    while (inner := getattr(found, "optimizer", None)) is not None and id(inner) not in seen:
        seen.add(id(inner))
        found = inner
    if not isinstance(found, KFAC):
        raise ValueError(
            f"there is no optimizer of rkfac in this {type(optimizer).__name__}, but {type(found).__name__}"
        )
    return found

"""Members of the family: classes that say what differs from another one, and show the whole of their signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rkfac.optim.arguments import refuse_lacking

Kind = TypeVar("Kind", bound=type)


def member(**defaults: Any) -> Callable[[Kind], Kind]:
    """Class decorator for a constructor `(self, model=None, lr=None, *, its own, **keywords)` that passes `keywords` to its base.

    `defaults` stand in the place of the base's. What `help()` and editors show is the whole signature, without what the
    class `lacks`: those keywords are refused with the reason.
    """

    def enrol(kind: Kind) -> Kind:
        own = vars(kind)["__init__"]
        base = inspect.signature(kind.__mro__[1]).parameters
        if unknown := defaults.keys() - base.keys():
            raise TypeError(f"{kind.__name__} changes defaults that its base does not have: {sorted(unknown)}")

        @functools.wraps(own)
        def construct(self: Any, model: Any = None, lr: float | None = None, **keywords: Any) -> None:
            refuse_lacking(kind.__name__, keywords, kind.lacks)  # type: ignore[attr-defined]
            own(self, model, lr, **{**defaults, **keywords})

        mine = inspect.signature(own)
        added = [p for p in mine.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in base]
        known = [p for p in base.values() if p.name not in kind.lacks]  # type: ignore[attr-defined]
        inherited = [p.replace(default=defaults[p.name]) if p.name in defaults else p for p in known]
        construct.__signature__ = mine.replace(parameters=[*list(mine.parameters.values())[:1], *inherited, *added])  # type: ignore[attr-defined]
        type.__setattr__(kind, "__init__", construct)
        return kind

    return enrol

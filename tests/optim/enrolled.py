"""Every optimizer of the package, one record each: what is listed here goes through the whole of tests/optim/suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rkfac
from optim import stated
from optim.problems import averages

# Ranks far below the layers' widths, so that the sketches really truncate.
SMALL: dict[str, Any] = {"rank": 3, "oversampling": 1}


@dataclass(frozen=True)
class Enrolled:
    """How an optimizer is built, how its running statistics are read, and what it cannot do.

    Calling a record builds the optimizer, so that a test needs to know no more than `build(model, **keywords)`.
    """

    make: Callable[..., torch.optim.Optimizer]
    statistics: Callable[[torch.optim.Optimizer], dict[str, Tensor]] = averages
    lacks: frozenset[str] = field(default_factory=frozenset)  # keywords, and rows, that mean nothing to it

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.make(*args, **keywords)


def _adamw_length(model: Any, *args: Any, momentum: float | None = None, **keywords: Any) -> Any:
    """AdamW's momentum is one of its betas: the suite's own goes to the only rule that has one, a fallback to SGD."""
    if keywords.get("fallback") == "sgd":
        keywords["momentum"] = momentum
    return stated.RSKFAC(model, *args, **{"graft": "adamw", **SMALL, **keywords})


OPTIMIZERS: dict[str, Enrolled] = {
    "KFAC": Enrolled(stated.KFAC, lacks=frozenset({"rank"})),
    "RSKFAC": Enrolled(partial(stated.RSKFAC, **SMALL)),
    "SREKFAC": Enrolled(partial(stated.SREKFAC, **SMALL)),
    "KFAC-Nystrom": Enrolled(partial(stated.KFAC, decomposition=rkfac.Nystrom(), **SMALL)),
    "KFAC-Auto": Enrolled(
        partial(stated.KFAC, decomposition=rkfac.Auto(exact_up_to=4, large=rkfac.Nystrom(warm_start=True)), **SMALL)
    ),
    "RSKFAC-auto-rank": Enrolled(partial(stated.RSKFAC, rank="auto", oversampling=1)),
    "graft-adamw": Enrolled(_adamw_length, lacks=frozenset({"momentum"})),
    "input-side": Enrolled(partial(stated.RSKFAC, sides="input", **SMALL), lacks=frozenset({"rows g"})),
    "output-side": Enrolled(partial(stated.RSKFAC, sides="output", **SMALL), lacks=frozenset({"rows a"})),
    "paper": Enrolled(partial(rkfac.RSKFAC, **{**rkfac.paper_defaults(), **SMALL})),
}

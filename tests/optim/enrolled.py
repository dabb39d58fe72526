"""Every optimizer of the package, one record each: what is listed here goes through the whole of tests/optim/suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rkfac
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
    lacks: frozenset[str] = field(default_factory=frozenset)  # keywords that mean nothing to it

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.make(*args, **keywords)


OPTIMIZERS: dict[str, Enrolled] = {
    "KFAC": Enrolled(rkfac.KFAC, lacks=frozenset({"rank"})),
    "RSKFAC": Enrolled(partial(rkfac.RSKFAC, **SMALL)),
    "SREKFAC": Enrolled(partial(rkfac.SREKFAC, **SMALL)),
    "KFAC-Nystrom": Enrolled(partial(rkfac.KFAC, decomposition=rkfac.Nystrom(), **SMALL)),
    "KFAC-Auto": Enrolled(
        partial(rkfac.KFAC, decomposition=rkfac.Auto(exact_up_to=4, large=rkfac.Nystrom(warm_start=True)), **SMALL)
    ),
    "RSKFAC-auto-rank": Enrolled(partial(rkfac.RSKFAC, rank="auto", oversampling=1)),
    "paper": Enrolled(partial(rkfac.RSKFAC, **{**rkfac.paper_defaults(), **SMALL})),
}

"""Every optimizer of the package, one line each: what is listed here goes through the whole of tests/optim/suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import rkfac

# Ranks far below the layers' widths, so that the sketches really truncate.
SMALL: dict[str, Any] = {"rank": 3, "oversampling": 1}

OPTIMIZERS: dict[str, Callable[..., rkfac.KFAC]] = {
    "KFAC": rkfac.KFAC,
    "RSKFAC": partial(rkfac.RSKFAC, **SMALL),
    "SREKFAC": partial(rkfac.SREKFAC, **SMALL),
    "KFAC-Nystrom": partial(rkfac.KFAC, decomposition=rkfac.Nystrom(), **SMALL),
    "KFAC-Auto": partial(
        rkfac.KFAC, decomposition=rkfac.Auto(exact_up_to=4, large=rkfac.Nystrom(warm_start=True)), **SMALL
    ),
    "RSKFAC-auto-rank": partial(rkfac.RSKFAC, rank="auto", oversampling=1),
    "paper": partial(rkfac.RSKFAC, **{**rkfac.paper_defaults(), **SMALL}),
}

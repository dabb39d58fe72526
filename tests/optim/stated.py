"""The optimizers with every number stated: no test depends on a default that it is not about."""

from __future__ import annotations

from functools import partial
from typing import Any

import rkfac

STATED: dict[str, Any] = {
    "damping": 0.1,
    "damping_rule": "factored",
    "relative_to": "largest",
    "factor_decay": 0.95,
    "factor_every": 10,
    "inverse_every": 50,
    "factor_start": "unbiased",
    "eager_start": False,
    "stagger": False,
    "rank": 220,
    "oversampling": 10,
    "power_iterations": 1,
    "tail": "zero",
    "warm_start": True,
    "update_clip": None,
    "kl_clip": None,
    "rows": None,
    "weight_decay": 0.0,
    "exclude": (),
}

# The step is SGD's in length unless a test says graft=None.
KFAC = partial(rkfac.KFAC, graft="sgd", **STATED)
RSKFAC = partial(rkfac.RSKFAC, graft="sgd", **STATED)
# A rank means nothing to exact bases: who has them sketched says how wide.
EKFAC = partial(
    rkfac.EKFAC, graft="sgd", **{k: v for k, v in STATED.items() if k != "rank"} | {"damping_rule": "product"}
)
SREKFAC = partial(rkfac.SREKFAC, graft="sgd", **STATED)
BKFAC = partial(rkfac.BKFAC, graft="sgd", apply="step", **STATED)
SKFAC = partial(rkfac.SKFAC, graft="sgd", weight_sharing="expand", **STATED)
KLDWRM = partial(rkfac.KLDWRM, **STATED)

# Without what means nothing to it.
SENG = partial(rkfac.SENG, graft="sgd", **{k: v for k, v in STATED.items() if k not in rkfac.SENG.lacks})

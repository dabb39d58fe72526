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
    lacks: frozenset[str] = field(default_factory=frozenset)  # keywords, rows and habits that mean nothing to it
    forgets: dict[str, Any] = field(default_factory=dict)  # keywords with which averages of no decay know no past
    period: str = "factor_every"  # what says how often it collects statistics
    coupled: bool = False  # whether SGD's decay joins the momentum under graft=None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.make(*args, **keywords)


def _adamw_length(model: Any, *args: Any, momentum: float | None = None, **keywords: Any) -> Any:
    """AdamW's momentum is one of its betas: the suite's own goes to the only rule that has one, a fallback to SGD."""
    if keywords.get("fallback") == "sgd":
        keywords["momentum"] = momentum
    return stated.RSKFAC(model, *args, **{"graft": "adamw", **SMALL, **keywords})


def _soap(model: Any, *args: Any, momentum: float | None = None, **keywords: Any) -> Any:
    """Running moments in a truncated basis, to the power of -1/2, at AdamW's length."""
    if keywords.get("fallback") == "sgd":
        keywords["momentum"] = momentum
    chosen = {"moments": "running", "power": -0.5, "graft": "adamw", "decomposition": rkfac.RSVD(), **SMALL}
    return stated.EKFAC(model, *args, **{**chosen, **keywords})


def _seng(model: Any, *args: Any, own: dict[str, Any], **keywords: Any) -> Any:
    """The suite's settings of factors and decompositions mean nothing to it."""
    known = {name: value for name, value in keywords.items() if name not in rkfac.SENG.lacks}
    return stated.SENG(model, *args, **{**own, **known})


def _enrolled_seng(**own: Any) -> Enrolled:
    return Enrolled(partial(_seng, own=own), lacks=frozenset(rkfac.SENG.lacks), period="inverse_every", coupled=True)


OPTIMIZERS: dict[str, Enrolled] = {
    "KFAC": Enrolled(stated.KFAC, lacks=frozenset({"rank"})),
    "RSKFAC": Enrolled(partial(stated.RSKFAC, **SMALL)),
    # The recommended recipe's curvature: layers as small as the suite's are inverted as they are.
    "recommended": Enrolled(
        partial(stated.RSKFAC, rank="auto", tail="trace", relative_to="mean", damping=1.0, oversampling=1)
    ),
    "graft-adamw": Enrolled(_adamw_length, lacks=frozenset({"momentum"})),
    "EKFAC": Enrolled(stated.EKFAC, lacks=frozenset({"rank"}), forgets={"carry": False}),
    "EKFAC-SOAP": Enrolled(_soap, lacks=frozenset({"momentum", "kl_clip"}), forgets={"carry": False}),
    # A rank for which the suite's batches leave some factors online and others dense.
    "BKFAC": Enrolled(partial(stated.BKFAC, rank=4, oversampling=1, apply="backward")),
    "SKFAC": Enrolled(stated.SKFAC, lacks=frozenset({"rank"})),
    "KLDWRM": Enrolled(
        partial(stated.KLDWRM, variant="q", decomposition=rkfac.RSVD(), **SMALL),
        lacks=frozenset({"free direction"}),
    ),
    "stale": Enrolled(partial(stated.RSKFAC, stale=0.1, **SMALL), lacks=frozenset({"fixed periods"})),
    "SENG": _enrolled_seng(),
    "paper": Enrolled(partial(rkfac.RSKFAC, **{**rkfac.paper_defaults(), **SMALL})),
}

# Their mathematics has tests of its own, and what the suite asks of them is asked of their kin above in more cases: each test
# takes them in one case each, RKFAC_WHOLE=1 in all of them (`pairs.py`).
VARIANTS: dict[str, Enrolled] = {
    "SREKFAC": Enrolled(partial(stated.SREKFAC, **SMALL)),
    "RSKFAC-auto-rank": Enrolled(partial(stated.RSKFAC, rank="auto", oversampling=1)),
    "KFAC-Auto": Enrolled(
        partial(stated.KFAC, decomposition=rkfac.Auto(exact_up_to=4, large=rkfac.Nystrom(warm_start=True)), **SMALL)
    ),
    "input-side": Enrolled(partial(stated.RSKFAC, sides="input", **SMALL), lacks=frozenset({"rows g"})),
    "KFAC-Nystrom": Enrolled(partial(stated.KFAC, decomposition=rkfac.Nystrom(), **SMALL)),
    "output-side": Enrolled(partial(stated.RSKFAC, sides="output", **SMALL), lacks=frozenset({"rows a"})),
    "EKFAC-sketched": Enrolled(partial(stated.EKFAC, decomposition=rkfac.RSVD(), **SMALL), forgets={"carry": False}),
    "EKFAC-running": Enrolled(
        partial(stated.EKFAC, moments="running"), lacks=frozenset({"rank"}), forgets={"carry": False}
    ),
    "BKFAC-step": Enrolled(partial(stated.BKFAC, rank=4, oversampling=1)),
    "BKFAC-b-r-c": Enrolled(
        partial(stated.BKFAC, variant="b-r-c", overwrite_every=2, correct_every=2, rank=4, oversampling=1)
    ),
    "SKFAC-moments": Enrolled(partial(stated.SKFAC, averaging="moments", rank=4)),
    "KLDWRM-so": Enrolled(partial(stated.KLDWRM, variant="so"), lacks=frozenset({"rank"})),
    # A weight with which the networks matter, and few of them, so that inner steps begin with the second step.
    "KLDWRM-qe": Enrolled(
        partial(stated.KLDWRM, variant="qe", inner=rkfac.InnerSteps(steps=3, networks=2, weight=1.0)),
        lacks=frozenset({"rank", "free direction", "layers apart", "steps without hooks", "reentrant checkpoints"}),
        forgets={"inner": rkfac.InnerSteps(steps=3, networks=1, weight=1.0)},
    ),
    # Everything that is drawn or replaced is, in layers this small; damped as published, for steps of their own length.
    "SENG-published": _enrolled_seng(
        columns=3, explicit_up_to=60, positions=2, scaling="published", product="published", graft=None, damping=0.5
    ),
}

MEMBERS: dict[str, Enrolled] = {**OPTIMIZERS, **VARIANTS}

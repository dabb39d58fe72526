"""Keywords that every optimizer of the family passes on, so that editors and type checkers know them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypedDict

import torch

from rkfac.curvature.decompose import Decomposition
from rkfac.curvature.fisher import Likelihood
from rkfac.optim.adaptive import LevenbergMarquardt


class Keywords(TypedDict, total=False):
    """Those of `KFAC`, which says what they mean; a test compares names and types with its constructor."""

    params: Iterable[Any] | None
    graft: Literal["sgd", "adamw"] | None
    apply: Literal["step", "backward"]
    momentum: float | None
    nesterov: bool
    betas: tuple[float, float] | None
    eps: float | None
    weight_decay: float | None
    weight_decay_from: int
    damping: float
    power: float
    damping_rule: Literal["factored", "product", "pi"]
    sides: Literal["both", "input", "output"]
    relative_to: Literal["mean", "largest"] | None
    factor_decay: float
    factor_every: int
    inverse_every: int
    factor_start: Literal["unbiased", "identity", "paper", "dropped"]
    eager_start: bool
    stagger: bool
    stale: float | None
    rank: int | Literal["auto"]
    oversampling: int
    power_iterations: int
    tail: Literal["zero", "trace"]
    warm_start: bool
    update_clip: float | None
    kl_clip: float | None
    fisher: Literal["empirical", "mc"]
    likelihood: Literal["categorical", "gaussian", "bernoulli"] | Likelihood
    weight_sharing: Literal["expand", "reduce"]
    rows: int | None
    loss_average: Literal["batch", "tokens", "sum"]
    fallback: Literal["sgd", "adamw"] | None
    fallback_scale: float
    include: Iterable[str] | str
    exclude: Iterable[str] | str
    max_factor_dim: int
    decomposition: Decomposition | None
    adaptive_damping: LevenbergMarquardt | None
    grad_scaler: Any
    process_group: Any
    memory: Literal["replicated", "owned"]
    max_failures: int
    maximize: bool
    generator: torch.Generator | None
    seed: int

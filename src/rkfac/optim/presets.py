"""Settings that belong together: named recipes, the paper's Section 5 with its schedules, and the classical recipe."""

from __future__ import annotations

from typing import Any

from rkfac.curvature.fisher import Likelihood
from rkfac.schedules import Steps

# What a kind of model wants beside the constructors' own defaults (docs/recipes.md).
RECIPES: dict[str, dict[str, Any]] = {"transformer": {"graft": "adamw", "power": -0.5, "damping": 0.01}}


def recipe(name: str) -> dict[str, Any]:
    """Keywords for a kind of model that does better with others than the defaults: "transformer".

    `rkfac.RSKFAC(model, lr=..., **rkfac.recipe("transformer"))`, with AdamW's learning rate or more.
    """
    if name not in RECIPES:
        known = ", ".join(map(repr, RECIPES))
        raise ValueError(f"there is no recipe {name!r}: the constructors' defaults serve, or take one of {known}")
    return dict(RECIPES[name])


def paper_defaults() -> dict[str, Any]:
    """Keywords that make KFAC, RSKFAC and SREKFAC run the paper's algorithm to the letter (values of epoch 1).

    `rkfac.RSKFAC(model, **rkfac.paper_defaults())`, then `Scheduler(optimizer, **rkfac.paper_schedules())`.
    """
    return {
        "lr": 0.3,
        "graft": None,
        "momentum": 0.0,
        "weight_decay": 7e-4,
        "weight_decay_from": 200,
        "damping": 0.1,
        "power": -1.0,
        "relative_to": "largest",
        "damping_rule": "factored",
        "factor_decay": 0.95,
        "factor_every": 10,
        "inverse_every": 50,
        "factor_start": "paper",
        "eager_start": False,
        "stagger": False,
        "rank": 220,
        "oversampling": 10,
        "power_iterations": 4,
        "tail": "zero",
        "warm_start": False,
        "update_clip": 0.07,
        "kl_clip": None,
        "fisher": "empirical",
        "rows": None,
        "weight_sharing": "expand",
        "fallback": "sgd",
        "fallback_scale": 1.0,
        "exclude": ("*Norm*", "Embedding"),
    }


def seng_defaults() -> dict[str, Any]:
    """Keywords that make SENG run as it was published, with the numbers of the paper's comparison (Table 1).

    `rkfac.SENG(model, **rkfac.seng_defaults())`; the learning rate goes down by `rkfac.schedules.Polynomial(0.05, 75, 6)`.
    """
    return {
        "lr": 0.05,
        "graft": None,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 1e-2,
        "weight_decay_from": 0,
        "damping": 2.0,
        "relative_to": None,
        "inverse_every": 200,
        "eager_start": False,
        "stagger": False,
        "update_clip": None,
        "kl_clip": None,
        "fisher": "empirical",
        "rows": None,
        "weight_sharing": "expand",
        "fallback": "sgd",
        "fallback_scale": 1.0,
        "columns": 128,
        "scaling": "published",
        "explicit_up_to": 700_000,
        "positions": 16,
        "product": "published",
        "norms": "published",
    }


def classical_defaults(likelihood: str | Likelihood = "categorical") -> dict[str, Any]:
    """Keywords of the classical recipe of Martens and Grosse: sampled Fisher, pi damping, KL clip, momentum.

    Made for autoencoders and other regressions, where the constructors' own defaults do better now; `likelihood` says what
    the model's outputs mean.
    """
    return {
        "lr": 0.1,
        "graft": None,
        "momentum": 0.9,
        "damping": 1.0,
        "power": -1.0,
        "relative_to": None,
        "damping_rule": "pi",
        "factor_decay": 0.95,
        "factor_every": 5,
        "inverse_every": 20,
        "factor_start": "unbiased",
        "eager_start": False,
        "stagger": False,
        "rank": 220,
        "oversampling": 10,
        "power_iterations": 1,
        "tail": "zero",
        "rows": None,
        "update_clip": None,
        "kl_clip": 0.03,
        "fisher": "mc",
        "likelihood": likelihood,
    }


def kld_wrm_defaults(variant: str = "so") -> dict[str, Any]:
    """Keywords of KLD-WRM's published MNIST runs, as far as they can be had (docs/family/kld-wrm.md says what differs).

    `rkfac.KLDWRM(model, **rkfac.kld_wrm_defaults("q"))`.
    """
    decays = {"so": 0.33, "q": 0.5, "qe": 0.5}
    if variant not in decays:
        raise ValueError(f"variant must be one of {', '.join(map(repr, decays))}, got {variant!r}")
    return {
        "variant": variant,
        "lr": 0.01,
        "momentum": 0.0,
        "weight_decay": 1e-3,
        "damping": 0.011,
        "relative_to": None,
        "damping_rule": "product",
        "factor_decay": decays[variant],
        "factor_every": 30,
        "inverse_every": 30,
        "factor_start": "unbiased",
        "eager_start": False,
        "stagger": False,
        "tail": "zero",
        "rows": None,
        "update_clip": None if variant == "so" else 2.0,
        "kl_clip": 0.1,
        "fisher": "empirical",
    }


def paper_schedules() -> dict[str, Steps]:
    """The schedules of Section 5 over epochs 1 to 50."""
    return {
        "lr": Steps({1: 0.3, 2: 0.2, 3: 0.1, 13: 0.03, 18: 0.01, 27: 0.003, 40: 0.001}),
        "damping": Steps({1: 0.1, 25: 0.05, 35: 0.01}),
        "inverse_every": Steps({1: 50, 20: 30}),
        "rank": Steps({1: 220, 15: 230}),
        "oversampling": Steps({1: 10, 22: 11, 30: 12}),
    }

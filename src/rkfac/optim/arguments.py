"""Validation of the optimizers' arguments: every refusal names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rkfac import compat
from rkfac.curvature.randomness import Randomness, Seeded, Shared


def _number(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Any:
    bounds = f"{'(' if low_open else '['}{low}, {high}{')' if high_open or high == math.inf else ']'}"

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            if name != "lr" or not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ValueError(f"{name} must be a number in {bounds}, got {value!r}")
            value = float(value)  # a capturable learning rate
        above = value > low if low_open else value >= low
        below = value < high if high_open else value <= high
        if not (above and below):
            raise ValueError(f"{name} must lie in {bounds}, got {value}")

    return check


def _integer(least: int) -> Any:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    return check


def _rank(name: str, value: Any) -> None:
    if value != "auto":
        if isinstance(value, str):
            raise ValueError(f"{name} must be a positive integer or 'auto', got {value!r}")
        _integer(1)(name, value)


def check_flag(name: str, value: Any) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _betas(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers in [0, 1), got {value!r}")
    for beta in value:
        _number(0, 1, high_open=True)(name, beta)


def _optional(check: Any) -> Any:
    return lambda name, value: None if value is None else check(name, value)


POSITIVE = _number(0, math.inf, low_open=True, high_open=True)
NOT_NEGATIVE = _number(0, math.inf, high_open=True)
BELOW_ONE = _number(0, 1, high_open=True)
COUNT = _integer(0)
AT_LEAST_ONE = _integer(1)
CLIP = _optional(POSITIVE)

GROUP_RULES: Mapping[str, Any] = {
    "lr": _number(0, 1e30),  # beyond, its product with anything is no float32
    "momentum": BELOW_ONE,
    "nesterov": check_flag,
    "betas": _betas,
    "eps": _number(0, 1e30),
    "maximize": check_flag,
    "weight_decay": NOT_NEGATIVE,
    "weight_decay_from": COUNT,
    "damping": POSITIVE,
    "factor_decay": BELOW_ONE,
    "factor_every": AT_LEAST_ONE,
    "inverse_every": AT_LEAST_ONE,
    "rank": _rank,
    "oversampling": COUNT,
    "power_iterations": COUNT,
    "update_clip": CLIP,
    "kl_clip": CLIP,
    "fallback_scale": NOT_NEGATIVE,
}


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a parameter group with a senseless value."""
    for name, rule in GROUP_RULES.items():
        if name in group:
            rule(name, group[name])
    if group.get("nesterov") and not group.get("momentum"):
        raise ValueError("nesterov needs a momentum greater than zero")
    shrink = float(group.get("lr", 0.0)) * float(group.get("weight_decay", 0.0))
    if shrink > 2:
        raise ValueError(f"lr times weight_decay is {shrink:g}: beyond 2 the decay makes weights grow")


def refuse_whole(group: Mapping[str, Any], of_all: Iterable[str]) -> None:
    """Refuse a parameter group that sets what is the same for a whole optimizer: it would be ignored."""
    for name in sorted(set(of_all) & group.keys() - {"params"}):
        raise ValueError(f"{name} is the same for all parameters: give it to the optimizer, not to a parameter group")


def refuse_lacking(kind: str, given: Iterable[str], lacks: Mapping[str, str]) -> None:
    """Refuse keywords that mean nothing to a member of the family, with the reason why."""
    for name in given:
        if name in lacks:
            raise ValueError(f"{kind} has no {name}: {lacks[name]}. Leave {name} away")


def check_power(power: Any, kl_clip: float | None, adaptive: bool) -> None:
    """Refuse a power that is none, and what only holds for the natural gradient itself."""
    _number(-1, 0, high_open=True)("power", power)
    if power != -1:
        for what, asked in (
            ("kl_clip, whose estimate", kl_clip is not None),
            ("adaptive_damping, whose model", adaptive),
        ):
            if asked:
                raise ValueError(
                    f"power={power:g} does not go with {what} is that of the natural gradient: use power=-1"
                )


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Refuse a word that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_patterns(name: str, value: Any) -> tuple[str, ...]:
    """Module-name patterns: one string or several."""
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{name} must be module-name patterns such as 'features.*', got {pattern!r}")
    return patterns


def check_processes(name: str, value: Any) -> None:
    """A process group, None or False."""
    group = getattr(torch.distributed, "ProcessGroup", None)
    if value is not None and value is not False and (group is None or not isinstance(value, group)):
        raise ValueError(
            f"{name} must be a torch.distributed process group, None (all processes) or False, got {value!r}"
        )


def check_scaler(name: str, value: Any) -> None:
    """Refuse what cannot be a gradient scaler."""
    if value is not None and not compat.is_scaler(value):
        raise ValueError(f"{name} must be a torch.amp.GradScaler, got {value!r}")


def check_stale(stale: Any, stagger: bool, name: str, blocks: Iterable[Any]) -> None:
    """Refuse a threshold that is none, and what has no intervals of its own."""
    if stale is None:
        return
    POSITIVE("stale", stale)
    if stagger:
        raise ValueError("stagger shares out fixed periods, and with stale= every layer has its own: use one of them")
    if not all(getattr(kind, "comparable", True) for kind in blocks):
        raise ValueError(f"stale= compares a layer's curvature with what it was, which {name} cannot: use stale=None")


def randomness_from(generator: Any, seed: Any) -> Randomness:
    """The caller's generator, or a seed for every draw."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {generator!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return Seeded(seed) if generator is None else Shared(generator)

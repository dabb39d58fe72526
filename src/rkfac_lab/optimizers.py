"""Optimizers by name: rkfac's, torch's, pytorch-optimizer's, any `module:Class`, and `rs-kfac+sgd`.

The last is a K-FAC that takes the place of another optimizer and its numbers: direction of the left one, steps of
the size of the right one (`graft`). A class of one's own that is derived from one of rkfac's is a K-FAC like the others.

Importing a module runs it: a configuration that names one is code. What is then called is a subclass of
`torch.optim.Optimizer`, or one of the laboratory's own, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import objects
from .errors import LabError, unknown
from .imports import named
from .structure import is_number

# Name -> where its class is; imported when asked for, so that nobody pays for what is not used.
CLASSES = {
    "k-fac": "rkfac:KFAC",
    "rs-kfac": "rkfac:RSKFAC",
    "sre-kfac": "rkfac:SREKFAC",
    "ek-fac": "rkfac:EKFAC",
    "b-kfac": "rkfac:BKFAC",
    "skfac": "rkfac:SKFAC",
    "kld-wrm": "rkfac:KLDWRM",
    "seng": "rkfac:SENG",
    "sgd": "torch.optim:SGD",
    "adamw": "torch.optim:AdamW",
    "muon": "rkfac_lab.muon:muon",
    "soap": "pytorch_optimizer:SOAP",
    "shampoo": "pytorch_optimizer:Shampoo",
}
# Where optimizers only notice at a `<`, or in their first step, that a text is no number.
PLAIN = ("torch", "pytorch_optimizer", "rkfac_lab")
GRAFTS = ("sgd", "adamw")


def is_kfac(name: str) -> bool:
    """Whether a name alone says that an optimizer is a K-FAC, which others are the baselines of; imports nothing.

    What stands before `+sgd` is one, or `grafted` would not have taken it.
    """
    own, plus, _ = name.partition("+")
    return CLASSES.get(own, own).startswith("rkfac:") or (bool(plus) and ":" in own)


def derives(kind: Any) -> bool:
    """Whether an optimizer's class is one of rkfac's, or anybody's own that is derived from one."""
    return any(base.__module__.split(".")[0] == "rkfac" for base in getattr(kind, "__mro__", ()))


def kin(name: str) -> str | None:
    """The K-FAC whose settings are those of an optimizer: itself, or the nearest that somebody's own derives from.

    None: it is no K-FAC. Importing somebody's own runs its module.
    """
    if name in CLASSES or ":" not in name:
        return name if name in CLASSES and is_kfac(name) else None
    factory = _factory(name)
    names = {_factory(known): known for known in CLASSES if is_kfac(known)}
    found = next((names[base] for base in getattr(factory, "__mro__", ()) if base in names), None)
    return found or ("k-fac" if derives(factory) else None)


def grafted(name: str) -> tuple[str, str | None]:
    """The class's name and whose numbers it takes: `rs-kfac+sgd` in its two parts, any other name and None."""
    own, plus, other = name.partition("+")
    if not plus or name in CLASSES:
        return name, None
    if kin(own) is None:
        raise unknown(f"K-FAC to put in the place of {other}:", own, filter(is_kfac, CLASSES))
    if other not in GRAFTS:
        raise unknown(f"optimizer for {own} to take the place of:", other, GRAFTS)
    return own, other


def takes_place_of(name: str) -> str | None:
    """Whose place and numbers a K-FAC such as `rs-kfac+sgd` takes; None for every other name, known or not."""
    _, _, other = name.partition("+")
    return other if other in GRAFTS and is_kfac(name) else None


def understood(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for the constructor; what can be refused without a model is refused here, by its name."""
    factory = _factory(name)
    accepted = _keywords(factory)
    keywords = objects.made(arguments) if derives(factory) else dict(arguments)
    for key in keywords:
        # What a member of rkfac's family lacks it refuses itself, and says why.
        if accepted and key not in accepted and key not in getattr(factory, "lacks", ()):
            raise unknown(f"argument of {name}", key, accepted)
    if factory.__module__.split(".")[0] in PLAIN:
        for key, parameter in inspect.signature(factory).parameters.items():
            if is_number(parameter.default) and isinstance(keywords.get(key), str | list | dict):
                raise LabError(f"{key} of {name} must be a number, not {keywords[key]!r}.")
    return keywords


def build(name: str, model: nn.Module, arguments: Mapping[str, Any], seed: int | None = None) -> torch.optim.Optimizer:
    """The optimizer called `name` for `model`; `seed` goes to rkfac's sketches unless `arguments` has one."""
    factory = _factory(name)
    takes_model = derives(factory) or factory.__module__.split(".")[0] == "rkfac_lab"
    keywords = understood(name, arguments)
    if seed is not None and "seed" in _keywords(factory) and not {"seed", "generator"} & set(keywords):
        keywords["seed"] = seed
    try:
        optimizer = factory(model if takes_model else list(model.parameters()), **keywords)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        raise LabError(f"{name} does not accept {given}: {str(error).rstrip('.')}.") from error
    return optimizer


def keywords(name: str) -> set[str]:
    """The keywords that the constructor of the optimizer called `name` is known to take."""
    return _keywords(_factory(name))


def own_settings(name: str, model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer's first group holds with these arguments, its constructor's defaults included."""
    optimizer = build(name, model, arguments)
    try:
        return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()


def _factory(name: str) -> Callable[..., torch.optim.Optimizer]:
    own, _ = grafted(name)
    place = CLASSES.get(own, own)
    if ":" not in place:
        raise unknown("optimizer", name, CLASSES)
    factory: Callable[..., torch.optim.Optimizer] = named("optimizer", name, place)
    if own not in CLASSES and not (inspect.isclass(factory) and issubclass(factory, torch.optim.Optimizer)):
        raise LabError(f"{name} is not a subclass of torch.optim.Optimizer and was not called; name another class.")
    return factory


def _keywords(factory: Callable[..., Any]) -> set[str]:
    """Names of the keyword arguments, looked for along the base classes too (presets pass `**keywords` on)."""
    if not inspect.isclass(factory):
        parameters = inspect.signature(factory).parameters.values()
        passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return set() if passes_on else {parameter.name for parameter in parameters}
    found: set[str] = set()
    for kind in inspect.getmro(factory):
        if "__init__" not in vars(kind) or kind in (object, torch.optim.Optimizer):
            continue
        own = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[2:]
        named = [p.name for p in own if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        found.update(named)
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found

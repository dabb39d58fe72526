"""Optimizers by name: rkfac's, torch's, pytorch-optimizer's, and any `module:Class`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import LabError, unknown

# Name -> where its class is; imported when asked for, so that nobody pays for what is not used.
CLASSES = {
    "k-fac": "rkfac:KFAC",
    "rs-kfac": "rkfac:RSKFAC",
    "sre-kfac": "rkfac:SREKFAC",
    "sgd": "torch.optim:SGD",
    "adamw": "torch.optim:AdamW",
    "muon": "rkfac_lab.muon:muon",
    "soap": "pytorch_optimizer:SOAP",
    "shampoo": "pytorch_optimizer:Shampoo",
}


def build(name: str, model: nn.Module, arguments: Mapping[str, Any], seed: int | None = None) -> torch.optim.Optimizer:
    """The optimizer called `name` for `model`; `seed` goes to rkfac's sketches unless `arguments` has one."""
    factory = _factory(name)
    takes_model = factory.__module__.split(".")[0] in ("rkfac", "rkfac_lab")
    accepted = _keywords(factory)
    keywords = dict(arguments)
    if seed is not None and "seed" in accepted and not {"seed", "generator"} & set(keywords):
        keywords["seed"] = seed
    for key in keywords:
        if accepted and key not in accepted:
            raise unknown(f"argument of {name}", key, accepted)
    try:
        optimizer = factory(model if takes_model else list(model.parameters()), **keywords)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        raise LabError(f"{name} does not accept {given}: {str(error).rstrip('.')}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LabError(f"{name} is not a torch.optim.Optimizer but a {type(optimizer).__name__}; name another class.")
    return optimizer


def _factory(name: str) -> Callable[..., Any]:
    module_name, colon, class_name = CLASSES.get(name, name).partition(":")
    if not colon:
        raise unknown("optimizer", name, CLASSES)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LabError(f"The optimizer {name} needs the module {module_name}: {error}.") from error
    if not hasattr(module, class_name):
        raise unknown(f"class in {module_name} named", class_name, (n for n in dir(module) if not n.startswith("_")))
    factory: Callable[..., Any] = getattr(module, class_name)
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

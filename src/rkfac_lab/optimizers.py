"""Optimizers by name: rkfac's, torch's, pytorch-optimizer's, and any `module:Class`.

Importing a module runs it: a configuration that names one is code. What is then called is a subclass of
`torch.optim.Optimizer`, or one of the laboratory's own, and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import LabError, one_line, unknown

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
    module_name, colon, class_name = CLASSES.get(name, name).partition(":")
    if not colon:
        raise unknown("optimizer", name, CLASSES)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LabError(f"The optimizer {name} needs the module {module_name}: {error}.") from error
    except (Exception, SystemExit) as error:  # importing runs whatever the module holds
        reason = one_line(error)
        raise LabError(f"The module {module_name} of the optimizer {name} cannot be imported ({reason}).") from error
    if not hasattr(module, class_name):
        raise unknown(f"class in {module_name} named", class_name, (n for n in dir(module) if not n.startswith("_")))
    factory: Callable[..., torch.optim.Optimizer] = getattr(module, class_name)
    if name not in CLASSES and not (inspect.isclass(factory) and issubclass(factory, torch.optim.Optimizer)):
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

"""Compiled models: statistics steps run without the graph, all others run it unbroken.

Hooks have side effects that no graph can hold. Where the optimizer knows the compiled model, its forward runs eagerly on
steps that collect statistics, so that graphs are neither broken nor traced again, `fullgraph=True` works, and graphs that
were traced before the optimizer existed do no harm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from rkfac import compat
from rkfac.curvature.capture import Capture
from rkfac.curvature.hooks import Hook


def unwrapped(model: nn.Module) -> nn.Module:
    """The module itself, without torch.compile's or DistributedDataParallel's wrapper."""
    while True:
        inner = compat.compiled_inside(model)
        if inner is not None:
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def run_eagerly(model: nn.Module, capture: Capture) -> None:
    """Let every compiled part of a model run without its graph while statistics are collected."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        if compat.compiled_inside(module) is not None:
            inside.update(id(inner) for inner in module.modules())
            stance = _Stance(capture)
            capture.install(partial(module.register_forward_pre_hook, _Begin(stance), prepend=True))
            capture.install(partial(module.register_forward_hook, _End(stance), always_call=True))
        compiled = compat.compiled_in_place(module)
        if compiled is not None and not isinstance(compiled, _Guarded):
            inside.update(id(inner) for inner in module.modules())
            guarded = _Guarded(compiled, _Stance(capture))
            capture.install(partial(_Replaced, module, guarded, compiled))


class _Stance:
    """Dynamo's stance during one forward."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._saved: list[Any] = []

    def begin(self) -> None:
        wanted = self.capture.active and torch.is_grad_enabled()
        self._saved.append(torch.compiler.set_stance("force_eager") if wanted else None)

    def end(self) -> None:
        saved = self._saved.pop() if self._saved else None
        if saved is not None:
            saved.__exit__(None, None, None)


class _Begin(Hook):
    def __init__(self, stance: _Stance) -> None:
        super().__init__(stance.capture)
        self.stance = stance

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.stance.begin()


class _End(_Begin):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.stance.end()


class _Guarded:
    """What stands in the place of a module's compiled call."""

    def __init__(self, compiled: Any, stance: _Stance) -> None:
        self.compiled, self.stance = compiled, stance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.stance.begin()
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.stance.end()


class _Replaced:
    """The guard in place, and how to take it out again."""

    def __init__(self, module: nn.Module, guarded: _Guarded, compiled: Any) -> None:
        self.module, self.compiled = module, compiled
        compat.replace_compiled_call(module, guarded)

    def remove(self) -> None:
        compat.replace_compiled_call(self.module, self.compiled)

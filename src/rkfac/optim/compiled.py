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
    inside: set[int] = set()  # what a graph holds already
    for module in model.modules():
        compiled = compat.compiled_call(module)
        if compiled is None or id(module) in inside:
            continue
        inside.update(id(inner) for inner in module.modules())
        capture.install(partial(_Replaced, module, compiled, capture))


class _Guarded:
    """A compiled call that leaves its graph alone on steps that collect statistics."""

    def __init__(self, compiled: Any, capture: Capture) -> None:
        self.compiled, self.capture = compiled, capture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = self.capture.active
        # Nothing is collected without gradients: the hooks stay out of that graph too.
        self.capture.active = active and torch.is_grad_enabled()
        try:
            if not self.capture.active:
                return self.compiled(*args, **kwargs)
            with torch.compiler.set_stance("force_eager"):
                return self.compiled(*args, **kwargs)
        finally:
            self.capture.active = active


class _Replaced:
    """The guard in place, and how to take it out again."""

    def __init__(self, module: nn.Module, compiled: Any, capture: Capture) -> None:
        self.module, self.compiled = module, compiled
        compat.replace_compiled_call(module, _Guarded(compiled, capture))

    def remove(self) -> None:
        """Let the graph run by itself again."""
        compat.replace_compiled_call(self.module, self.compiled)

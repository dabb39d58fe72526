"""A model that is looked at and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from rkfac import compat
from rkfac.curvature.capture import Capture
from rkfac.curvature.hooks import Hook


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, buffers, gradients and random numbers are afterwards what they were before.

    Optimizers of this package that watch the model do not see what happens inside.
    """
    modes = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone(), compat.version_of(b)) for b in model.buffers()]
    with ExitStack() as stack:
        for capture in _watching(model):
            stack.enter_context(capture.unhooked())
        stack.enter_context(torch.random.fork_rng())
        try:
            model.eval()
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for buffer, before, version in buffers:
                    if compat.version_of(buffer) != version:
                        buffer.copy_(before)


def _watching(model: nn.Module) -> list[Capture]:
    """The captures of all optimizers whose hooks are on a model."""
    hooks = [hook for module in model.modules() for hook in compat.forward_hooks(module) if isinstance(hook, Hook)]
    return list({id(hook.capture): hook.capture for hook in hooks if hook.capture is not None}.values())

"""Networks of the workloads; importing this package registers them all."""

from __future__ import annotations

from . import autoencoder, convnet, mlp, resnet, transformer, vgg  # noqa: F401  (their import registers them)
from .registry import build, model, names

__all__ = ["build", "model", "names"]

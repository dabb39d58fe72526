"""What a module means to K-FAC: its rows a, its rows g, its gradient as a matrix. No state."""

from rkfac.layers import conv, embedding, linear, norm  # noqa: F401  (each registers its adapters)
from rkfac.layers.base import (
    Adapter,
    KroneckerAdapter,
    Uncovered,
    UnitAdapter,
    adapter_for,
    known_classes,
    own_parameters,
)

__all__ = ["Adapter", "KroneckerAdapter", "Uncovered", "UnitAdapter", "adapter_for", "known_classes", "own_parameters"]

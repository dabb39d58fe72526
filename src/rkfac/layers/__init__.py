"""What a module means to K-FAC: its rows a, its rows g, its gradient as a matrix. No state."""

from rkfac.layers import attention, conv, embedding, linear, norm  # noqa: F401  (each registers its adapters)
from rkfac.layers.base import (
    Adapter,
    KroneckerAdapter,
    Uncovered,
    UnitAdapter,
    Use,
    adapter_for,
    is_container,
    known_classes,
    own_parameters,
    uses_of,
)
from rkfac.layers.tied import TiedAdapter, together

__all__ = [
    "Adapter",
    "KroneckerAdapter",
    "TiedAdapter",
    "Uncovered",
    "UnitAdapter",
    "Use",
    "adapter_for",
    "is_container",
    "known_classes",
    "own_parameters",
    "together",
    "uses_of",
]

"""What a module means to K-FAC: its rows a, its rows g, its gradient as a matrix. No state.

For layers of one's own (docs/extending.md): `register`, and the adapters to derive from, from the easiest to the barest:
`ProductAdapter` and `ScaleAdapter`, `KroneckerAdapter` and `UnitAdapter`.
"""

from rkfac.layers import attention, conv, embedding, linear, norm  # noqa: F401  (each registers its adapters)
from rkfac.layers.base import Adapter, KroneckerAdapter, Uncovered, UnitAdapter, Use
from rkfac.layers.product import ProductAdapter
from rkfac.layers.registry import adapter_for, is_container, known_classes, own_parameters, register, uses_of
from rkfac.layers.scale import ChannelScaleAdapter, ScaleAdapter
from rkfac.layers.tied import TiedAdapter, together

__all__ = [
    "Adapter",
    "ChannelScaleAdapter",
    "KroneckerAdapter",
    "ProductAdapter",
    "ScaleAdapter",
    "TiedAdapter",
    "Uncovered",
    "UnitAdapter",
    "Use",
    "adapter_for",
    "is_container",
    "known_classes",
    "own_parameters",
    "register",
    "together",
    "uses_of",
]

"""Shapes in signatures: jaxtyping's annotations where it is installed (tests check them), plain tensors elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float
else:
    try:
        from jaxtyping import Float
    except ImportError:

        class Float:
            """Stands in for jaxtyping: the library itself needs torch alone."""

            def __class_getitem__(cls, item: Any) -> Any:
                return Tensor


__all__ = ["Float"]

"""nn.MultiheadAttention: projections that it computes from weights whose owners are never called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from rkfac import compat
from rkfac.layers.base import Container, KroneckerAdapter
from rkfac.layers.linear import LinearAdapter
from rkfac.layers.registry import register


class ProjectionAdapter(LinearAdapter):
    """A Linear layer of whatever names its parameters have, which nobody calls."""

    rowwise = False  # there is no output of its own that a hook could look at

    def __init__(self, weight_name: str = "weight", bias_name: str | None = "bias") -> None:
        self.weight_name, self.bias_name = weight_name, bias_name


@register(nn.MultiheadAttention)
class Attention(Container):
    """The packed in-projection is one layer of 3 d outputs, its separate ones are three without a bias of their own.

    Where query, key and value are one tensor, rows are that tensor and the gradients of all three projections side by
    side. Where they differ, each product is a call of the packed layer whose other outputs nobody uses: their gradients
    are zero. Both sum up to autograd's gradient.
    """

    PACKED = ProjectionAdapter("in_proj_weight", "in_proj_bias")
    SEPARATE = tuple(ProjectionAdapter(f"{part}_proj_weight", None) for part in "qkv")
    OUT = ProjectionAdapter()

    def inner(self, module: nn.Module) -> Mapping[str, tuple[nn.Module, KroneckerAdapter]]:
        """The packed in-projection under no name, or q_proj_weight, k_proj_weight and v_proj_weight; and out_proj."""
        found: dict[str, tuple[nn.Module, KroneckerAdapter]] = {}
        if all(compat.own_parameter(module, adapter.weight_name) is not None for adapter in self.SEPARATE):
            found |= {adapter.weight_name: (module, adapter) for adapter in self.SEPARATE}
        else:
            found[""] = (module, self.PACKED)
        return found | {"out_proj": (cast(nn.MultiheadAttention, module).out_proj, self.OUT)}

    def samples(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Of the query, which is (positions, samples, d), or the other way round; one without a batch."""
        query = cast(Tensor, args[0] if args else kwargs["query"])
        return 1 if query.ndim == 2 else query.shape[0 if cast(nn.MultiheadAttention, module).batch_first else 1]

"""Linear layers on inputs of any number of leading dimensions, and their kin with a transposed weight."""

from __future__ import annotations

from torch import Tensor, nn

from rkfac.layers.base import NOT_PLAIN, Adapter, Uncovered
from rkfac.layers.product import ProductAdapter
from rkfac.layers.registry import overridden, recognises, register


@register(nn.Linear)
class LinearAdapter(ProductAdapter):
    """y = W x + b at every leading position: rows are drawn from what came, and these alone are made precise."""

    rowwise = True

    def _inputs(self, module: nn.Module, x: Tensor) -> Tensor:
        return x

    def _gradients(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        return g


class TransposedAdapter(LinearAdapter):
    """y = x W + b with W (d_in, d_out), at every leading position."""

    rowwise = False  # hooks that look at rows take the weight for the matrix
    transposed = True


CONV1D = TransposedAdapter()


@recognises
def _conv1d(module: nn.Module) -> Adapter | Uncovered | None:
    """Conv1D of the transformers library (GPT-2), known by its name and its shapes: nothing of it is imported."""
    for kind in type(module).__mro__:
        if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
            break
    else:
        return None
    if reason := overridden(module, kind):
        return Uncovered(reason)
    weight, bias = CONV1D.plain_weight(module), CONV1D.bias(module)
    if weight is None or bias is None:
        return NOT_PLAIN
    nf = getattr(module, "nf", None)
    nx = getattr(module, "nx", len(weight))  # earlier versions of the library keep nf alone
    if weight.shape != (nx, nf) or bias.shape != (nf,):
        return Uncovered(f"Conv1D of another shape than its nx={nx} and nf={nf} say")
    return CONV1D

"""One layer's damped curvature as an operator on its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rkfac.linalg import Spectral
from rkfac.operators.layout import Layout


class Operator:
    """C, symmetric and positive definite, on flat vectors: the layer's weight flattened, then its bias.

    `C @ v`, `C.solve(v)` (C^-1 v) and `C.sqrt_solve(v)` (C^-1/2 v, the symmetric root) take v of shape (n,) or (n, k) and cost
    4 (r_G + r_A) n flops a vector; all is computed in float64 and returned in the precision of v. No n x n matrix is ever
    formed. `C.flatten(tensors)` and `C.unflatten(v)` go between vectors and tensors in the parameters' own shapes.
    `C.inverse` and `C.power(p)` are operators of the same kind. `scipy.sparse.linalg.aslinearoperator(C)` works.
    """

    dtype = "float64"  # as NumPy and SciPy call the precision it computes in

    def __init__(self, name: str, parameters: Sequence[str], layout: Layout, spectral: Spectral) -> None:
        self.name = name  # of the layer
        self.parameters = tuple(parameters)  # names of those it acts on, in their order
        self._layout = layout
        self._spectral = spectral

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n)."""
        return self._layout.size, self._layout.size

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._spectral.values.device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.shape[0]:,} parameters: {', '.join(self.parameters)})"

    # --- products

    def __matmul__(self, v: Tensor) -> Tensor:
        """C v."""
        return self._applied(self._spectral, v)

    def solve(self, v: Tensor) -> Tensor:
        """C^-1 v."""
        return self._applied(self._spectral.to_power(-1.0), v)

    def sqrt_solve(self, v: Tensor) -> Tensor:
        """C^-1/2 v: of white noise it makes samples of N(0, C^-1)."""
        return self._applied(self._spectral.to_power(-0.5), v)

    def _applied(self, spectral: Spectral, v: Tensor) -> Tensor:
        if v.ndim not in (1, 2) or len(v) != self.shape[0] or not v.is_floating_point():
            raise ValueError(
                f"layer {self.name!r} has {self.shape[0]} parameters: give a vector ({self.shape[0]},) or columns "
                f"({self.shape[0]}, k) of floating point, not {v.dtype} of shape {tuple(v.shape)}; flatten() makes one"
            )
        if not v.numel():
            return v.detach().clone()  # no columns
        rows = v.detach().double().reshape(len(v), -1).mT
        product = self._layout.parted(spectral @ self._layout.joined(rows)).mT
        return product.reshape(v.shape).to(v.dtype)

    def power(self, power: float) -> Operator:
        """C^power."""
        return Operator(self.name, self.parameters, self._layout, self._spectral.to_power(power))

    @property
    def inverse(self) -> Operator:
        """C^-1."""
        return self.power(-1.0)

    # --- numbers

    def logdet(self) -> float:
        """Natural logarithm of the determinant."""
        return float(self._spectral.logdet())

    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self._spectral.trace())

    def diagonal(self) -> Tensor:
        """diag(C), (n,) in float64; that of the inverse is `C.inverse.diagonal()`."""
        return self._layout.parted(self._spectral.diagonal()[None])[0]

    # --- shapes

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor a parameter, in the parameters' shapes, as a vector."""
        return self._layout.flat(tensors)

    def unflatten(self, v: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `flatten`."""
        return self._layout.shaped(v)

    # --- as SciPy has it

    def matvec(self, x: Any) -> Any:
        """C x for an array of NumPy's, which is what SciPy asks for."""
        return (self @ torch.tensor(x, dtype=torch.float64, device=self.device)).cpu().numpy()

    rmatvec = matmat = rmatmat = matvec

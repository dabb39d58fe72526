"""The two-sided solve of one layer: S = (G + l I)^-1 J (A + l I)^-1 or its product-damped kin.

With U_G, U_A the kept bases, J splits into four blocks: kept x kept, kept x rest, rest x kept, rest x rest. A damped
Kronecker inverse multiplies the first entry by entry, the next two by a vector, the last by a number (`Multipliers`).
All of it works on numbers of size one: multipliers are kept in units of the largest, J in units of its own peak, and the
true size of S is one float64 number beside it, so that nothing overflows or vanishes on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial, singledispatch

import torch
from torch import Tensor

from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.scaling import peak
from rkfac.linalg.shapes import Float

# Share of rounding in S up to which the short formula J + left @ right may be used: there the kept modes come out as
# differences of terms as large as the largest multiplier times J.
TOLERATED = 5e-4
ROUNDINGS = 4  # of size eps ||J|| that one short solve is good for


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A diagonal factor (one-hot inputs): its own eigenvalues, nothing discarded."""

    s: Float[Tensor, "d"]

    @property
    def fill(self) -> Float[Tensor, ""]:
        """Nothing is discarded."""
        return self.s.new_zeros(())

    @property
    def full(self) -> bool:
        """Nothing is discarded."""
        return True

    def __matmul__(self, V: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
        """The matrix times V."""
        return self.s[:, None].to(V) * V


@dataclass(frozen=True, eq=False)
class Multipliers:
    """What the damped inverse does to the four blocks of J: `scale` times values of at most one, all in float64.

    A block that does not exist, because nothing was discarded on its side, is multiplied by zero.
    """

    both: Float[Tensor, "*batch rg ra"]
    output: Float[Tensor, "*batch rg"]
    input: Float[Tensor, "*batch ra"]
    rest: Float[Tensor, "*batch"]
    scale: Float[Tensor, ""]

    def spread(self) -> float:
        """Largest multiplier over the smallest that acts on kept modes of the same group."""
        return float((1 / self.both.amin((-2, -1))).max())


def factored(G: LowRank, A: LowRank | Diagonal, damping_G: float | Tensor, damping_A: float | Tensor) -> Multipliers:
    """(G + l_G I)^-1 J (A + l_A I)^-1: the paper's rule (Algorithms 1 and 4)."""
    g, g_rest = _reciprocals(G, damping_G)
    a, a_rest = _reciprocals(A, damping_A)
    return _normalised(g[..., :, None] * a[..., None, :], g * a_rest[..., None], a * g_rest[..., None], g_rest * a_rest)


def product(G: LowRank, A: LowRank | Diagonal, damping: float | Tensor) -> Multipliers:
    """(A (x) G + l I)^-1 vec J: damping on the product spectrum, all four blocks."""
    g, a, g_rest, a_rest = (t.double() for t in (G.s, A.s, G.fill, A.fill))
    l = torch.as_tensor(damping, dtype=torch.float64, device=g.device)
    discarded_G, discarded_A = float(not G.full), float(not A.full)
    return _normalised(
        1 / (g[..., :, None] * a[..., None, :] + l[..., None, None]),
        discarded_A / (g * a_rest[..., None] + l[..., None]),
        discarded_G / (a * g_rest[..., None] + l[..., None]),
        discarded_G * discarded_A / (g_rest * a_rest + l),
    )


def _reciprocals(low: LowRank | Diagonal, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Of the damped kept eigenvalues and of the damped rest, in float64; zero for a rest that does not exist."""
    s = low.s.double()
    l = torch.as_tensor(damping, dtype=torch.float64, device=s.device)
    rest = 1 / (low.fill.double() + l)
    return 1 / (s + l[..., None]), torch.zeros_like(rest) if low.full else rest


def _normalised(both: Tensor, output: Tensor, input: Tensor, rest: Tensor) -> Multipliers:
    """In units of the largest."""
    scale = torch.stack([t.amax() for t in (both, output, input, rest)]).amax()
    return Multipliers(both / scale, output / scale, input / scale, rest / scale, scale)


@dataclass(frozen=True, eq=False)
class Solution:
    """S = scale * [matrix | vector], entries of about one; `scale` is a float64 number on the device.

    The bias's column stands apart, so that the matrix has the weight's own layout.
    """

    matrix: Float[Tensor, "*batch dg dw"]
    vector: Float[Tensor, "*batch dg"] | None
    scale: Float[Tensor, ""]

    def dense(self) -> Float[Tensor, "*batch dg da"]:
        """S in float64 (inspection and tests)."""
        S = self.matrix if self.vector is None else torch.cat([self.matrix, self.vector[..., None]], dim=-1)
        return S.double() * self.scale


class Preconditioner(ABC):
    """A damped Kronecker inverse made ready for many gradients."""

    @abstractmethod
    def solve(self, J: Float[Tensor, "*batch dg dw"], j: Float[Tensor, "*batch dg"] | None) -> Solution:
        """S for the gradient [J | j]: J the weight's as a matrix, j the bias's (None without bias)."""


@singledispatch
def preconditioner(A: LowRank | Diagonal, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    """The inverse for an input factor A and an output factor G; 4 (r_G + r_A) d_G d_A flops a gradient."""
    raise TypeError(f"no two-sided solve for an input factor of type {type(A).__name__}")


@preconditioner.register
def _(A: LowRank, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    if A.U.dtype != G.U.dtype:  # one of them needed more digits
        A, G = (LowRank(low.U.double(), low.s, low.tail) for low in (A, G))
    if torch.finfo(G.U.dtype).eps * multipliers.spread() <= TOLERATED:
        return _Short(G, A, multipliers)
    # Whether digits are lost depends on J; asking costs nothing where nobody waits for the answer.
    return (_Watched if G.U.device.type == "cpu" else _Exact)(G, A, multipliers)


@preconditioner.register
def _(A: Diagonal, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    return _OneHot(G, multipliers)


class _Short(Preconditioner):
    """Everything in the bases' own precision, S = J + left @ right with inner dimension r_G + r_A."""

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        self.G, self.A, self.scale = G, A, m.scale
        self.both, self.output, self.input, self.rest = (t.to(G.U) for t in (m.both, m.output, m.input, m.rest))
        self.plain = m.rest.ndim == 0 and float(m.rest) == 1.0  # as nearly always: then J itself stays as it is

    def solve(self, J: Tensor, j: Tensor | None) -> Solution:
        matrix, vector, size = _in_units_of_its_peak(J, j, self.G.U.dtype)
        U_G, U_A = self.G.U, self.A.U
        P = _joined(U_G.mT @ matrix, None if vector is None else (U_G.mT @ vector[..., None])[..., 0])  # r_G x d_A
        K = P @ U_A  # r_G x r_A
        if self.G.full and self.A.full:
            return self._product(U_G, (K * self.both) @ U_A.mT, vector, size)
        if self.G.full:
            right = self.output[..., None] * P + (K * (self.both - self.output[..., None])) @ U_A.mT
            return self._product(U_G, right, vector, size)
        R = matrix @ U_A[..., : J.shape[-1], :]  # d_G x r_A
        if vector is not None:
            R = R + vector[..., :, None] * U_A[..., -1:, :]
        if self.A.full:
            left = R * self.input[..., None, :] + U_G @ (K * (self.both - self.input[..., None, :]))
            return self._product(left, U_A.mT, vector, size)
        rest = self.rest[..., None, None]
        corner = self.both - self.output[..., :, None] - self.input[..., None, :] + rest
        top = (self.output - self.rest[..., None])[..., :, None] * P + (K * corner) @ U_A.mT
        left = torch.cat([U_G, R * (self.input - self.rest[..., None])[..., None, :]], dim=-1)
        right = torch.cat([top, U_A.mT], dim=-2)
        add = torch.Tensor.addmm_ if matrix.ndim == 2 else torch.Tensor.baddbmm_
        S = add(matrix if self.plain else matrix.mul_(rest), left, right[..., : J.shape[-1]].contiguous())
        if vector is not None:
            vector = self.rest[..., None] * vector + (left @ right[..., -1:])[..., 0]
        return Solution(S, vector, self.scale * size)

    def _product(self, left: Tensor, right: Tensor, vector: Tensor | None, size: Tensor) -> Solution:
        """S = left @ right, with or without a column for the bias."""
        if vector is None:
            return Solution(left @ right, None, self.scale * size)
        matrix = left @ right[..., :-1].contiguous()
        return Solution(matrix, (left @ right[..., -1:])[..., 0], self.scale * size)


class _Watched(Preconditioner):
    """The short formula, and the exact one for a J so deep in the kept modes that S is hardly larger than its rounding."""

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        self.short = _Short(G, A, m)
        self.precise = partial(_Exact, G, A, m)
        self.exact: _Exact | None = None

    def solve(self, J: Tensor, j: Tensor | None) -> Solution:
        solution = self.short.solve(J, j)
        length = _norm(solution.matrix, solution.vector) * (
            solution.scale / self.short.scale
        )  # the multipliers in units
        rounding = ROUNDINGS * torch.finfo(solution.matrix.dtype).eps * _norm(J, j)
        if rounding <= TOLERATED * length:
            return solution
        self.exact = self.exact or self.precise()
        return self.exact.solve(J, j)


class _Exact(Preconditioner):
    """The four blocks formed one by one in float64, for dampings so small that the short formula would cancel.

    The bases are orthonormal to their own precision only; one Newton-Schulz step makes them so to that of float64, for
    what leaks out of the kept modes is multiplied by the largest number there is.
    """

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        self.m, self.dtype = m, G.U.dtype
        self.U_G, self.U_A = _orthonormal(G.U), _orthonormal(A.U)
        self.rest_G, self.rest_A = not G.full, not A.full

    def solve(self, J: Tensor, j: Tensor | None) -> Solution:
        weight, bias, size = _in_units_of_its_peak(J, j, torch.float64)
        matrix = _joined(weight, bias)
        m, U_G, U_A = self.m, self.U_G, self.U_A
        P = U_G.mT @ matrix
        K = P @ U_A
        kept = (K * m.both) @ U_A.mT
        if self.rest_A:
            kept = kept + m.output[..., None] * (P - K @ U_A.mT)
        S = U_G @ kept
        if self.rest_G:
            below = matrix - U_G @ P
            R = below @ U_A
            S = S + (R * m.input[..., None, :]) @ U_A.mT
            if self.rest_A:
                S = S + m.rest[..., None, None] * (below - R @ U_A.mT)
        return _in_own_units(S, m.scale * size, self.dtype, j is not None)


class _OneHot(Preconditioner):
    """A diagonal input factor: every column of J has its own eigenvalue."""

    def __init__(self, G: LowRank, m: Multipliers) -> None:
        self.G, self.scale = G, m.scale
        self.both, self.input = m.both.to(G.U), m.input.to(G.U)

    def solve(self, J: Tensor, j: Tensor | None) -> Solution:
        matrix, _, size = _in_units_of_its_peak(J, None, self.G.U.dtype)
        K = self.G.U.mT @ matrix
        S = self.G.U @ (K * self.both)
        if not self.G.full:
            S = S + (matrix - self.G.U @ K) * self.input
        return _in_own_units(S, self.scale * size, self.G.U.dtype, False)


def _norm(matrix: Tensor, vector: Tensor | None) -> Tensor:
    """||[matrix | vector]|| in float64; zero or Inf beyond float32's squares, and then the exact formula decides."""
    parts = [matrix] if vector is None else [matrix, vector]
    return torch.stack([torch.linalg.vector_norm(part).double().square() for part in parts]).sum().sqrt()


def _orthonormal(U: Tensor) -> Tensor:
    U = U.double()
    return 1.5 * U - 0.5 * (U @ (U.mT @ U))


def _in_units_of_its_peak(J: Tensor, j: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copies of J and j in units of a power of two near their largest entry, and that unit in float64."""
    largest_entry = peak(J) if j is None else torch.maximum(peak(J), peak(j))
    # Not beyond what can be a factor in this precision; NaN and Inf have no exponent and stay what they are.
    largest = 120 if torch.finfo(J.dtype).bits <= 32 else 1000
    exponent = torch.frexp(largest_entry.double()).exponent.clamp(-largest, largest)
    unit = torch.exp2(-exponent.to(dtype))
    matrix = torch.mul(J, unit, out=torch.empty(J.shape, dtype=dtype, device=J.device))
    # A gradient of zero has no size: beside a damping below 1e-38 any other would be Inf in float32, and 0 * Inf is NaN.
    size = torch.where(largest_entry == 0, 0.0, torch.exp2(exponent.double()))
    return matrix, None if j is None else (j * unit).to(dtype), size


def _joined(matrix: Tensor, vector: Tensor | None) -> Tensor:
    """The bias is the last column."""
    return matrix if vector is None else torch.cat([matrix, vector[..., None]], dim=-1)


def _in_own_units(S: Tensor, scale: Tensor, dtype: torch.dtype, bias: bool) -> Solution:
    """With entries of about one: the multipliers that matter may be far below the largest one."""
    largest = peak(S).double()
    unit = torch.where(largest > 0, largest, 1.0)
    S = (S / unit).to(dtype)
    return Solution(S[..., :-1], S[..., -1], scale * unit) if bias else Solution(S, None, scale * unit)

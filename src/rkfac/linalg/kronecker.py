"""The two-sided solve of one layer: S = (G + l I)^-1 J (A + l I)^-1 or its product-damped kin.

What the inverse does to the four blocks of J is known (`multipliers.py`). S itself is not formed: it is a multiple of J and
a product of two thin matrices, which are added to whatever S is for, and its length and its product with J follow from the
four blocks. A temporary of a weight's size costs more than all of this. All of it works on numbers of size one: multipliers
are kept in units of the largest, J, where it is very large or small, in units of its own peak, and the true size of S is
one number beside it (`host.py`; float64 on a device), so that nothing overflows or vanishes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch

import torch
from torch import Tensor

from rkfac.linalg.host import Number, at_once, number, root, size_of
from rkfac.linalg.intact import Intact
from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.measured import in_units_of_its_peak, joined, measured, moderate, square_of
from rkfac.linalg.multipliers import Diagonal, Multipliers, Overlapping
from rkfac.linalg.orthonormal import polished
from rkfac.linalg.parts import Corrected, Part, Whole, same
from rkfac.linalg.scaling import peak
from rkfac.linalg.shadow import AGREEMENT, Shadow, projections
from rkfac.linalg.shapes import Float

# Tells the shadow of [J | j] whose squared length is given, where somebody may know it already.
Seer = Callable[[Tensor, Tensor | None, Number], Shadow]

# Share of rounding in S up to which the short formula J + left @ right may be used: there the kept modes come out as
# differences of terms as large as the largest multiplier times J.
TOLERATED = 5e-4
ROUNDINGS = 4  # of size eps ||J|| that one short solve is good for
MEASURED = 1e-3  # share of ||J||^2 below which ||S||^2 (in units) is too much of a difference to be had from the blocks
OVERHEAD = 1e7  # flops that the operations of a thin solve beyond an explicit one are worth on a CPU


@dataclass(frozen=True, eq=False)
class Solution:
    """S = scale * [weight's share | bias's share].

    `given` is ||[J | j]||; `square` is ||S||^2 and `inner()` is <S, [J | j]>, both in units: the true ones are
    `scale^2 * square` and `scale * size * inner()`, `size` being the unit that J was measured in.
    """

    weight: Part
    bias: Float[Tensor, "*batch dg"] | None
    scale: Number
    size: Number
    given: Number
    square: Number
    inner: Callable[[], Number]

    def dense(self, J: Tensor, j: Tensor | None) -> Float[Tensor, "*batch dg da"]:
        """S in float64, for the J and j that were solved for (inspection and tests)."""
        S = self.weight.formed(J, [(J, 1.0)])
        S = S if self.bias is None else torch.cat([S, self.bias.double()[..., None]], dim=-1)
        return S * self.scale


@dataclass(frozen=True, eq=False)
class Asked:
    """How a gradient J is to be solved for.

    `matrix` views a tensor in the weight's shape as J is; `spend`: J is nobody else's and may be overwritten; `seer` is
    asked for J's projections where they are needed and J is of moderate size.
    """

    matrix: Callable[[Tensor], Tensor] = same
    spend: bool = False
    seer: Seer | None = None


class Preconditioner(ABC):
    """A damped Kronecker inverse made ready for many gradients."""

    projects = False  # whether a solve asks for projections onto the kept modes of both sides

    def solve(
        self,
        J: Float[Tensor, "*batch dg dw"],
        j: Float[Tensor, "*batch dg"] | None,
        matrix: Callable[[Tensor], Tensor] = same,
        spend: bool = False,
        seer: Seer | None = None,
    ) -> Solution:
        """S for the gradient [J | j]: J the weight's as a matrix, j the bias's (None without bias); see `Asked`."""
        return self._solve(J, j, Asked(matrix, spend, seer))

    @abstractmethod
    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        """The same."""


@singledispatch
def preconditioner(A: LowRank | Diagonal, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    """The inverse for an input factor A and an output factor G; 4 (r_G + r_A) d_G d_A flops a gradient."""
    raise TypeError(f"no two-sided solve for an input factor of type {type(A).__name__}")


@preconditioner.register
def _(A: LowRank, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    if A.U.dtype != G.U.dtype:  # one of them needed more digits
        A, G = (LowRank(low.U.double(), low.s, low.tail) for low in (A, G))
    quick: _Short | _Explicit
    if multipliers.sides is not None and _small(G, A):
        g, g_rest, a, a_rest = multipliers.sides
        (of_G, size_G), (of_A, size_A) = _inverse(G, g, g_rest), _inverse(A, a, a_rest)
        quick = _Explicit(of_G, of_A, number(size_G * size_A))
    else:
        quick = _Short(G, A, multipliers)
    roundings = torch.finfo(G.U.dtype).eps * multipliers.spread()
    if roundings * (AGREEMENT if quick.projects and at_once(G.U) else 1) <= TOLERATED:
        return quick
    # Whether digits are lost depends on J; asking costs nothing where nobody waits for the answer.
    precise = partial(_Exact, G, A, multipliers)
    return _Watched(quick, precise) if at_once(G.U) else precise()


@preconditioner.register
def _(A: Diagonal, G: LowRank, multipliers: Multipliers) -> Preconditioner:
    return _OneHot(G, multipliers)


def inverses(
    A: Intact, G: Intact, damping_A: float, damping_G: float, exact: Callable[[], Multipliers]
) -> Preconditioner:
    """The same for factors that are kept as they are, by their damped inverses; 2 (d_G + d_A) d_G d_A flops a gradient.

    `exact` tells the multipliers, for which both are decomposed after all, where these prove to have too few digits.
    DecompositionError where a factor has no damped inverse.
    """
    of_G, unit_G, condition_G = G.damped_inverse(damping_G)
    of_A, unit_A, condition_A = A.damped_inverse(damping_A)
    quick = _Explicit(of_G, of_A, unit_G * unit_A)
    if torch.finfo(of_G.dtype).eps * condition_G * condition_A <= TOLERATED:
        return quick
    return _Watched(quick, lambda: _Exact(G, A, exact()))


class _Short(Preconditioner):
    """Everything in the bases' own precision, S = rest * J + left @ right with inner dimension r_G + r_A at most."""

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        self.U_G, self.U_A, self.scale = G.U, A.U, number(m.scale)
        # Then what J is multiplied by is a number in its precision, whatever J is.
        self.moderate = moderate(self.scale)
        self.dtype = G.U.dtype
        self.G_full, self.A_full = G.full, A.full
        self.projects = not (G.full or A.full)
        self.plain = Overlapping(m.both, m.output, m.input, m.rest, G.full, A.full)
        both, output, input, rest = (t.square() for t in (m.both, m.output, m.input, m.rest))
        self.squares = Overlapping(both, output, input, rest, G.full, A.full)
        # What the thin factors are made of: multipliers of what the multiple of J has not done yet.
        self.both, self.rest, self.corner = (t.to(G.U) for t in (m.both, m.rest, self.plain.both))
        self.share = self.rest if self.rest.ndim else number(self.rest)
        self.on_output = self.plain.output.to(G.U)[..., :, None]
        self.on_input = self.plain.input.to(G.U)[..., None, :]

    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        J, j, norms, total, unit, size = measured(J, j, self.U_G.dtype, self.moderate)
        width = J.shape[-1]
        P, R = self._shadow(J, j, total, asked.seer if unit is None else None)
        K = P @ self.U_A  # r_G x r_A
        left, right = self._thin(P, K, R)
        bias = None
        if j is not None:
            bias = (left @ right[..., -1:])[..., 0]
            bias = bias if R is None or self.A_full else self.rest[..., None] * j + bias
        rest = None if R is None or self.A_full else self.share
        part = Corrected(asked.matrix, rest, unit, left, right[..., :width])
        energies = (K, None if self.A_full else P, R, norms)
        square = number(self.squares.total(*energies))
        if not (self.G_full and self.A_full) and not self._certain(square, total):
            square = self._formed(J, part, bias, asked.spend)
        return Solution(
            part, bias, self.scale * size, size, root(total) * size, square, partial(self._inner, *energies)
        )

    def _inner(self, K: Tensor, P: Tensor | None, R: Tensor | None, norms: Number) -> Number:
        return number(self.plain.total(K, P, R, norms))

    def _shadow(self, J: Tensor, j: Tensor | None, square: Number, seer: Seer | None) -> tuple[Tensor, Tensor | None]:
        """U_G^T [J | j] (r_G x d_A) and, where G's modes are not all there are, [J | j] U_A (d_G x r_A)."""
        if seer is not None and self.projects:
            shadow = seer(J, j, square)
            return shadow.output, shadow.input
        return projections(self.U_G, self.U_A, J, j, not self.G_full)

    def _thin(self, P: Tensor, K: Tensor, R: Tensor | None) -> tuple[Tensor, Tensor]:
        """left and right, the latter with the bias's column."""
        U_G, U_A = self.U_G, self.U_A
        if R is None and self.A_full:
            return U_G, (K * self.both) @ U_A.mT
        if R is None:
            return U_G, self.on_output * P + (K * self.corner) @ U_A.mT
        if self.A_full:
            return R * self.on_input + U_G @ (K * self.corner), U_A.mT
        top = self.on_output * P + (K * self.corner) @ U_A.mT
        return torch.cat([U_G, R * self.on_input], dim=-1), torch.cat([top, U_A.mT], dim=-2)

    def _certain(self, square: Number, given: Number) -> bool:
        """Whether ||S||^2 is not a small difference of large numbers; NaN is certain enough."""
        if isinstance(square, Tensor):
            return self.U_G.dtype == torch.float64
        return not square < (1e-6 if self.U_G.dtype == torch.float64 else MEASURED) * given

    def _formed(self, J: Tensor, part: Corrected, bias: Tensor | None, spend: bool) -> Number:
        """||S||^2 in units, measured on S itself, for which J's memory is used if it may be."""
        if part.rest is None:
            S = torch.matmul(part.left, part.right, out=J) if spend else part.left @ part.right
        else:
            S = (J if spend else J.clone()).mul_(self.rest[..., None, None])
            (torch.Tensor.addmm_ if J.ndim == 2 else torch.Tensor.baddbmm_)(S, part.left, part.right)
        return square_of(S) if bias is None else square_of(S) + square_of(bias)


class _Explicit(Preconditioner):
    """Small factors: S = G^-1 J A^-1 with both damped inverses as matrices, for there operations cost more than flops."""

    def __init__(self, G: Tensor, A: Tensor, scale: Number) -> None:
        """G^-1 and A^-1 with entries of about one, and the scale of their product."""
        self.G, self.A, self.scale, self.dtype = G, A, scale, G.dtype
        self.moderate = moderate(scale)

    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        J, j, _, total, _, size = measured(J, j, self.dtype, self.moderate)
        given = joined(J, j)
        S = self.G @ given @ self.A
        part, bias = Whole(S if j is None else S[..., :-1], asked.matrix), None if j is None else S[..., -1]
        inner = partial(_inner, S, given)
        return Solution(part, bias, self.scale * size, size, root(total) * size, square_of(S), inner)


def _small(G: LowRank, A: LowRank) -> bool:
    """Whether two products with d x d matrices cost no more than thin ones and all the operations around those."""
    groups, d_G, d_A = math.prod(G.U.shape[:-2]), G.dim, A.dim
    thin = 0 if G.full and A.full else 4 * (G.rank + A.rank)
    return groups * d_G * d_A * (2 * (d_G + d_A) - thin) <= OVERHEAD


def _inverse(low: LowRank, kept: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """U diag(kept) U^T + rest (I - U U^T) in units of its largest eigenvalue, in the basis's precision; and that unit."""
    unit, U = torch.maximum(kept.amax(), rest.amax()), polished(low.U)
    kept, rest = kept / unit, (rest / unit)[..., None, None]
    inverse = (U * (kept[..., None, :] - rest)) @ U.mT
    inverse.diagonal(dim1=-2, dim2=-1).add_(rest[..., 0])
    return inverse.to(low.U.dtype), unit


def _inner(S: Tensor, given: Tensor) -> Number:
    return number((S * given).sum().double())


class _Watched(Preconditioner):
    """The quick formula, and the exact one for a J so deep in the kept modes that S is hardly larger than its rounding."""

    def __init__(self, quick: _Short | _Explicit, precise: Callable[[], Preconditioner]) -> None:
        self.quick, self.precise, self.projects = quick, precise, quick.projects
        self.blind = False  # whether a followed shadow has not been precise enough for S
        self.exact: Preconditioner | None = None

    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        seer = None if self.blind else asked.seer
        solution = self.quick._solve(J, j, Asked(asked.matrix, seer=seer))
        if self._good(solution, ROUNDINGS if seer is None else AGREEMENT):
            return solution
        if seer is not None:
            self.blind = True
            return self._solve(J, j, asked)
        self.exact = self.exact or self.precise()
        return self.exact._solve(J, j, asked)

    def _good(self, solution: Solution, roundings: int) -> bool:
        rounding = roundings * torch.finfo(self.quick.dtype).eps * solution.given
        return bool(rounding <= TOLERATED * root(solution.square) * solution.size)


class _Exact(Preconditioner):
    """The four blocks formed one by one in float64, for dampings so small that the short formula would cancel.

    The bases are orthonormal to their own precision only; one Newton-Schulz step makes them so to that of float64, for
    what leaks out of the kept modes is multiplied by the largest number there is.
    """

    def __init__(self, G: LowRank, A: LowRank, m: Multipliers) -> None:
        self.m, self.dtype = m, torch.promote_types(G.U.dtype, A.U.dtype)
        self.U_G, self.U_A = polished(G.U), polished(A.U)
        self.rest_G, self.rest_A = not G.full, not A.full

    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        weight, bias, size = in_units_of_its_peak(J, j, torch.float64)
        given = joined(weight, bias)
        m, U_G, U_A = self.m, self.U_G, self.U_A
        P = U_G.mT @ given
        K = P @ U_A
        kept = (K * m.both) @ U_A.mT
        if self.rest_A:
            kept = kept + m.output[..., None] * (P - K @ U_A.mT)
        S = U_G @ kept
        if self.rest_G:
            below = given - U_G @ P
            R = below @ U_A
            S = S + (R * m.input[..., None, :]) @ U_A.mT
            if self.rest_A:
                S = S + m.rest[..., None, None] * (below - R @ U_A.mT)
        return _whole(S, given, number(m.scale) * size, size, self.dtype, j is not None, asked.matrix)


class _OneHot(Preconditioner):
    """A diagonal input factor: every column of J has its own eigenvalue."""

    def __init__(self, G: LowRank, m: Multipliers) -> None:
        self.G, self.scale = G, number(m.scale)
        self.both, self.input = m.both.to(G.U), m.input.to(G.U)

    def _solve(self, J: Tensor, j: Tensor | None, asked: Asked) -> Solution:
        given, _, size = in_units_of_its_peak(J, None, self.G.U.dtype)
        K = self.G.U.mT @ given
        S = self.G.U @ (K * self.both)
        if not self.G.full:
            S = S + (given - self.G.U @ K) * self.input
        return _whole(S, given, self.scale * size, size, self.G.U.dtype, False, asked.matrix)


def _whole(
    S: Tensor,
    given: Tensor,
    scale: Number,
    size: Number,
    dtype: torch.dtype,
    bias: bool,
    matrix: Callable[[Tensor], Tensor],
) -> Solution:
    """With entries of about one: the multipliers that matter may be far below the largest one."""
    unit = size_of(number(peak(S).double()))
    length = root(square_of(given)) * size
    S = S / unit
    square, inner = square_of(S), partial(_inner, S, given)
    S = S.to(dtype)
    part = Whole(S[..., :-1] if bias else S, matrix)
    return Solution(part, S[..., -1] if bias else None, scale * unit, size, length, square, inner)

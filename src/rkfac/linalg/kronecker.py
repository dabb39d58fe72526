"""The two-sided solve of one layer, S = (G + l I)^-1 J (A + l I)^-1 or its product-damped kin, without forming S.

With U_G, U_A the kept bases, J splits into four blocks: kept x kept, kept x rest, rest x kept, rest x rest. A damped
Kronecker inverse multiplies the first entry by entry, the next two by a vector, the last by a number (`Spectrum`).
Summed up this is S = c J + left @ right with inner dimension r_G + r_A, so S can be added to a parameter in place, and its
norm and its inner product with J come from small matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.lowrank import LowRank
from rkfac.linalg.shapes import Float


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What the damped inverse does to each of the four blocks of J: reciprocals of (eigenvalue + damping)."""

    both: Float[Tensor, "*batch rg ra"]
    output: Float[Tensor, "*batch rg"]
    input: Float[Tensor, "*batch ra"]
    rest: Float[Tensor, "*batch"]


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A diagonal factor (one-hot inputs): its own eigenvalues, nothing discarded."""

    s: Float[Tensor, "d"]

    @property
    def fill(self) -> Float[Tensor, ""]:
        """Nothing is discarded."""
        return self.s.new_zeros(())


def factored_spectrum(
    G: LowRank, A: LowRank | Diagonal, damping_G: float | Tensor, damping_A: float | Tensor
) -> Spectrum:
    """(G + l_G I)^-1 J (A + l_A I)^-1: the paper's rule (Algorithms 1 and 4)."""
    g, g_rest = _inverse(G, damping_G)
    a, a_rest = _inverse(A, damping_A)
    return Spectrum(
        both=g[..., :, None] * a[..., None, :],
        output=g * a_rest[..., None],
        input=a * g_rest[..., None],
        rest=g_rest * a_rest,
    )


def product_spectrum(G: LowRank, A: LowRank | Diagonal, damping: float | Tensor) -> Spectrum:
    """(A (x) G + l I)^-1 vec J: damping on the product spectrum, all four blocks."""
    l = torch.as_tensor(damping, dtype=G.s.dtype, device=G.s.device)
    g, a, g_rest, a_rest = G.s, A.s, G.fill, A.fill
    return Spectrum(
        both=1 / (g[..., :, None] * a[..., None, :] + l[..., None, None]),
        output=1 / (g * a_rest[..., None] + l[..., None]),
        input=1 / (a * g_rest[..., None] + l[..., None]),
        rest=1 / (g_rest * a_rest + l),
    )


def _inverse(low: LowRank | Diagonal, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """Reciprocals of the damped kept eigenvalues and of the damped rest."""
    l = torch.as_tensor(damping, dtype=low.s.dtype, device=low.s.device)
    return 1 / (low.s + l[..., None]), 1 / (low.fill + l)


@dataclass(frozen=True, eq=False)
class Direction:
    """S = scale * J + left @ right for the gradient J it was made from, with ||S||^2 and <S, J> at hand.

    A bias, when the layer has one, is the last column of `right` and of J.
    """

    scale: Float[Tensor, "*batch"] | None
    left: Float[Tensor, "*batch dg k"]
    right: Float[Tensor, "*batch k da"]
    squared_norm: Float[Tensor, ""]
    inner: Float[Tensor, ""]

    def add_weight(
        self,
        weight: Float[Tensor, "*batch dg dw"],
        J: Float[Tensor, "*batch dg dw"],
        factor: Float[Tensor, ""] | None = None,
        alpha: float = 1.0,
    ) -> None:
        """weight += alpha * factor * (S without its bias column), in place, no temporary of the weight's size.

        `factor` stays a tensor so that a clip decided on the device costs no synchronisation.
        """
        if self.scale is not None:
            weight.addcmul_(J, _times(self.scale, factor)[..., None, None], value=alpha)
        right = self.right[..., : weight.shape[-1]]
        if weight.ndim == 2:
            weight.addmm_(_times(self.left, factor), right, alpha=alpha)
        else:
            weight.baddbmm_(_times(self.left, factor), right, alpha=alpha)

    def add_bias(
        self,
        bias: Float[Tensor, "*batch dg"],
        j: Float[Tensor, "*batch dg"],
        factor: Float[Tensor, ""] | None = None,
        alpha: float = 1.0,
    ) -> None:
        """bias += alpha * factor * (last column of S), in place."""
        if self.scale is not None:
            bias.addcmul_(j, _times(self.scale, factor)[..., None], value=alpha)
        bias.add_((_times(self.left, factor) @ self.right[..., -1:]).squeeze(-1), alpha=alpha)

    def dense(self, J: Float[Tensor, "*batch dg da"]) -> Float[Tensor, "*batch dg da"]:
        """S itself, bias column included in J (inspection and tests)."""
        S = self.left @ self.right
        return S if self.scale is None else S + self.scale[..., None, None] * J


def precondition(
    J: Float[Tensor, "*batch dg dw"],
    j: Float[Tensor, "*batch dg"] | None,
    G: LowRank,
    A: LowRank,
    spectrum: Spectrum,
) -> Direction:
    """Apply a damped Kronecker inverse to the gradient [J | j]; 4 (r_G + r_A) d_G d_A flops.

    J is the weight's gradient as a matrix and j the bias's (None without bias), kept apart so that no joined copy of the
    weight's size is made.
    """
    P = _with_bias(G.U.mT @ J, None if j is None else G.U.mT @ j[..., None])  # r_G x d_A
    K = P @ A.U  # r_G x r_A
    squares = K.square()
    if G.full and A.full:
        return Direction(None, G.U, (K * spectrum.both) @ A.U.mT, *_moments(squares, spectrum.both))
    if G.full:
        rows = (P.square().sum(-1) - squares.sum(-1)).clamp_min(0)
        right = torch.baddbmm if P.ndim == 3 else torch.addmm
        product = right(spectrum.output[..., None] * P, K * (spectrum.both - spectrum.output[..., None]), A.U.mT)
        return Direction(None, G.U, product, *_moments(squares, spectrum.both, (rows, spectrum.output)))
    R = J @ A.U[..., : J.shape[-1], :]  # d_G x r_A
    if j is not None:
        R = R + j[..., :, None] * A.U[..., -1:, :]
    columns = (R.square().sum(-2) - squares.sum(-2)).clamp_min(0)
    if A.full:
        left = R * spectrum.input[..., None, :] + G.U @ (K * (spectrum.both - spectrum.input[..., None, :]))
        return Direction(None, left, A.U.mT, *_moments(squares, spectrum.both, (columns, spectrum.input)))
    rows = (P.square().sum(-1) - squares.sum(-1)).clamp_min(0)
    total = J.square().sum((-2, -1)) if j is None else J.square().sum((-2, -1)) + j.square().sum(-1)
    rest = (total - rows.sum(-1) - columns.sum(-1) - squares.sum((-2, -1))).clamp_min(0)
    s = spectrum
    corner = s.both - s.output[..., :, None] - s.input[..., None, :] + s.rest[..., None, None]
    top = (s.output - s.rest[..., None])[..., :, None] * P + (K * corner) @ A.U.mT
    left = torch.cat([G.U, R * (s.input - s.rest[..., None])[..., None, :]], dim=-1)
    moments = _moments(squares, s.both, (rows, s.output), (columns, s.input), (rest, s.rest))
    return Direction(s.rest, left, torch.cat([top, A.U.mT], dim=-2), *moments)


def precondition_diagonal(J: Float[Tensor, "dg da"], G: LowRank, spectrum: Spectrum) -> Float[Tensor, "dg da"]:
    """The same for a diagonal input factor, S itself: every column of J has its own eigenvalue."""
    K = G.U.mT @ J
    if G.full:
        return G.U @ (K * spectrum.both)
    return G.U @ (K * (spectrum.both - spectrum.input)) + J * spectrum.input


def _times(tensor: Tensor, factor: Tensor | None) -> Tensor:
    return tensor if factor is None else tensor * factor


def _with_bias(P: Tensor, p: Tensor | None) -> Tensor:
    return P if p is None else torch.cat([P, p], dim=-1)


def _moments(squares: Tensor, both: Tensor, *blocks: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """||S||^2 and <S, J> from the squared coordinates of J in each block and what the inverse multiplies them by."""
    pairs = [(squares, both), *blocks]
    norm = sum(((square * inverse.square()).sum() for square, inverse in pairs), squares.new_zeros(()))
    inner = sum(((square * inverse).sum() for square, inverse in pairs), squares.new_zeros(()))
    return norm, inner

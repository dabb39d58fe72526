"""What a damped Kronecker inverse, or another power of it, does to the four blocks of a gradient.

With U_G, U_A the kept bases, J splits into four blocks: kept x kept, kept x rest, rest x kept, rest x rest. The first is
multiplied entry by entry, the next two by a vector, the last by a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg.host import Number
from rkfac.linalg.lowrank import LowRank, relative
from rkfac.linalg.shapes import Float


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

    @property
    def largest(self) -> Float[Tensor, ""]:
        """Largest entry."""
        return self.s.amax(-1)

    @property
    def dim(self) -> int:
        """Size d of the matrix."""
        return self.s.shape[-1]

    @property
    def rank(self) -> int:
        """All of them are kept."""
        return self.dim

    def split(self, V: Float[Tensor, "*batch n d"]) -> tuple[Float[Tensor, "*batch n d"], Float[Tensor, "*batch n 0"]]:
        """Rows are their own coordinates, and nothing is left of them."""
        return V, V[..., :0]

    def distinct(self) -> Diagonal:
        """Entries are modes of their own, whatever their values."""
        return self

    def shares_of(self, other: Diagonal) -> None:
        """The modes are always the same."""

    def __matmul__(self, V: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
        """The matrix times V."""
        return self.s[:, None].to(V) * V

    def distance(self, other: Diagonal) -> float:
        """||X - Y||_F / ||Y||_F, Y being `other`."""
        unit = torch.maximum(self.s.amax(), other.s.amax()).clamp_min(torch.finfo(self.s.dtype).tiny)
        X, Y = self.s / unit, other.s / unit
        return relative(float((X - Y).square().sum()), float(Y.square().sum()))


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
    # Where the blocks are products of one number a side: those of G's kept and discarded, A's kept and discarded.
    sides: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def spread(self) -> float:
        """Largest multiplier over the smallest that acts on kept modes of the same group."""
        return float((1 / self.both.amin((-2, -1))).max())


def factored(
    G: LowRank, A: LowRank | Diagonal, damping_G: float | Tensor, damping_A: float | Tensor, power: float = -1.0
) -> Multipliers:
    """(G + l_G I)^-1 J (A + l_A I)^-1: the paper's rule (Algorithms 1 and 4); or both to another power."""
    g, g_rest = _powers(G, damping_G, power)
    a, a_rest = _powers(A, damping_A, power)
    blocks = g[..., :, None] * a[..., None, :], g * a_rest[..., None], a * g_rest[..., None], g_rest * a_rest
    return replace(normalised(*blocks), sides=(g, g_rest, a, a_rest))


def product(G: LowRank, A: LowRank | Diagonal, damping: float | Tensor, power: float = -1.0) -> Multipliers:
    """(A (x) G + l I)^-1 vec J: damping on the product spectrum, all four blocks; or another power of it."""
    g, a, g_rest, a_rest = (t.double() for t in (G.s, A.s, G.fill, A.fill))
    l = torch.as_tensor(damping, dtype=torch.float64, device=g.device)
    discarded_G, discarded_A = float(not G.full), float(not A.full)
    return normalised(
        (g[..., :, None] * a[..., None, :] + l[..., None, None]) ** power,
        discarded_A * (g * a_rest[..., None] + l[..., None]) ** power,
        discarded_G * (a * g_rest[..., None] + l[..., None]) ** power,
        discarded_G * discarded_A * (g_rest * a_rest + l) ** power,
    )


def _powers(low: LowRank | Diagonal, damping: float | Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Of the damped kept eigenvalues and of the damped rest, in float64; zero for a rest that does not exist."""
    s = low.s.double()
    l = torch.as_tensor(damping, dtype=torch.float64, device=s.device)
    rest = (low.fill.double() + l) ** power
    return (s + l[..., None]) ** power, torch.zeros_like(rest) if low.full else rest


def normalised(both: Tensor, output: Tensor, input: Tensor, rest: Tensor) -> Multipliers:
    """In units of the largest."""
    scale = torch.stack([t.amax() for t in (both, output, input, rest)]).amax()
    return Multipliers(both / scale, output / scale, input / scale, rest / scale, scale)


class Overlapping:
    """Multipliers of the four blocks as those of projections that overlap: of U_G^T J U_A, U_G^T J, J U_A and J."""

    def __init__(self, both: Tensor, output: Tensor, input: Tensor, rest: Tensor, G_full: bool, A_full: bool) -> None:
        self.both, self.output, self.input, self.rest = both, output, input, rest
        if not A_full:
            self.both = self.both - output[..., :, None]
        if not G_full:
            self.both = self.both - input[..., None, :]
        if not (A_full or G_full):
            self.both = self.both + rest[..., None, None]
            self.output, self.input = output - rest[..., None], input - rest[..., None]

    def total(self, K: Tensor, P: Tensor | None, R: Tensor | None, norms: Number) -> Tensor:
        """sum of (multiplier x energy of J) over the four blocks.

        K = U_G^T J U_A, P = U_G^T J (None: A is full), R = J U_A (None: G is full), norms = ||J||^2 a group.
        """
        total = (self.both * K.double().square()).sum()
        if P is not None:
            total = total + (self.output * torch.linalg.vector_norm(P, dim=-1).double().square()).sum()
        if R is not None:
            total = total + (self.input * torch.linalg.vector_norm(R, dim=-2).double().square()).sum()
        return (total if P is None or R is None else total + (self.rest * norms).sum()).clamp_min(0)

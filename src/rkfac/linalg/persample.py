"""Gradients sample by sample, the rows of U in F = U^T U, and (l I + U^T U)^-1 by the small kernel U U^T.

A gradient is a batch of matrices (c, d_G, d_A), one a group. Rows are formed, or kept as the factors they are products of:
u_n = vec(sum_s g_ns x_ns^T). Sampling looks at some entries of every row, or at some rows and columns of every matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rkfac.linalg.lapack import eigenpairs, left_singular
from rkfac.linalg.shapes import Float

CHUNK = 1 << 24  # elements of a product that are held at once: 64 MB in float32


class Rows(ABC):
    """U (n, D), known by what is asked of it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(c, d_G, d_A) of one row."""

    @property
    def entries(self) -> int:
        """D."""
        return math.prod(self.shape)

    @abstractmethod
    def kernel(self) -> Float[Tensor, "n n"]:
        """U U^T."""

    @abstractmethod
    def times(self, J: Tensor) -> Float[Tensor, " n"]:
        """U vec(J)."""

    @abstractmethod
    def back(self, b: Float[Tensor, " n"], onto: Tensor) -> Tensor:
        """A gradient plus U^T b, as a new one."""

    @abstractmethod
    def columns(self, places: Tensor) -> Formed:
        """Some entries of every row."""


@dataclass(frozen=True, eq=False)
class Formed(Rows):
    """U itself, for rows of a shape."""

    U: Float[Tensor, "n D"]
    row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As it was told."""
        return self.row

    def kernel(self) -> Float[Tensor, "n n"]:
        """2 n^2 D flops."""
        return self.U @ self.U.mT

    def times(self, J: Tensor) -> Float[Tensor, " n"]:
        """2 n D flops."""
        return self.U @ J.flatten()

    def back(self, b: Float[Tensor, " n"], onto: Tensor) -> Tensor:
        """2 n D flops."""
        return torch.addmv(onto.flatten(), self.U.mT, b).view(self.row)

    def columns(self, places: Tensor) -> Formed:
        """A copy of them."""
        return Formed(self.U[:, places], (1, 1, len(places)))


@dataclass(frozen=True, eq=False)
class Outer(Rows):
    """u_n = vec(sum_s g_ns x_ns^T), never formed."""

    G: Float[Tensor, "c n s dg"]
    X: Float[Tensor, "c n s da"]

    @property
    def shape(self) -> tuple[int, ...]:
        """(c, d_G, d_A)."""
        return (self.G.shape[0], self.G.shape[-1], self.X.shape[-1])

    def kernel(self) -> Float[Tensor, "n n"]:
        """sum_ab (x_ma . x_nb) (g_ma . g_nb), 2 n^2 s^2 (d_G + d_A) flops."""
        c, n, s, _ = self.G.shape
        made = []
        some = max(1, CHUNK // (c * n * s * s))  # rows of the kernel at once
        for G, X in zip(self.G.split(some, 1), self.X.split(some, 1), strict=True):
            products = (G.flatten(1, 2) @ self.G.flatten(1, 2).mT).mul_(X.flatten(1, 2) @ self.X.flatten(1, 2).mT)
            made.append(products.sum(0).view(G.shape[1], s, n, s).sum((1, 3)))
        return torch.cat(made)

    def times(self, J: Tensor) -> Float[Tensor, " n"]:
        """<sum_s g x^T, J>, 2 n s d_G d_A flops."""
        G, X = self.G.flatten(1, 2), self.X.flatten(1, 2)
        # The wider side is contracted first: what is left of each row is narrow.
        left = (G @ J * X) if G.shape[-1] >= X.shape[-1] else (X @ J.mT * G)
        return left.sum((0, 2)).view(self.G.shape[1:3]).sum(1)

    def back(self, b: Float[Tensor, " n"], onto: Tensor) -> Tensor:
        """sum_n b_n sum_s g x^T, 2 n s d_G d_A flops."""
        return torch.baddbmm(onto, (self.G * b[:, None, None]).flatten(1, 2).mT, self.X.flatten(1, 2))

    def columns(self, places: Tensor) -> Formed:
        """Products of entries of G and X."""
        c, i, j = torch.unravel_index(places, self.shape)
        made = (self.G[c, :, :, i] * self.X[c, :, :, j]).sum(-1)  # (places, n)
        return Formed(made.mT.contiguous(), (1, 1, len(places)))

    def grid(self, i: Tensor | None, j: Tensor | None) -> Outer:
        """Some rows and some columns of every matrix; None: all."""
        G = self.G if i is None else self.G[..., i]
        return Outer(G, self.X if j is None else self.X[..., j])

    def formed(self) -> Formed:
        """U."""
        made = self.G.mT @ self.X  # (c, n, dg, da)
        return Formed(made.transpose(0, 1).reshape(self.G.shape[1], -1), self.shape)

    def mixed(self, b: Float[Tensor, " n"]) -> tuple[Float[Tensor, "c dg s"], Float[Tensor, "c s da"]]:
        """The published stand-in for U^T b as a product of rank s: exact for one sample, and for samples all alike.

        (sum_n |b_n|^1/2 G_n) (sum_n b_n X_n)^T / sum_m |b_m|^1/2.
        """
        root = b.abs().sqrt()
        total = root.sum()
        left = torch.einsum("n,cnsg->csg", root, self.G)
        right = torch.einsum("n,cnsa->csa", b / torch.where(total > 0, total, torch.ones_like(total)), self.X)
        return left.mT, right

    def shortened(self, positions: int, name: str) -> Outer:
        """At most so many positions a sample: the leading singular directions of each G_n."""
        if self.G.shape[2] <= positions:
            return self
        left, sigma = left_singular(self.G, name)  # (c, n, s, k)
        left, sigma = left[..., :positions], sigma[..., :positions]
        # The stand-in for `back` mixes samples, so nothing here may be LAPACK's choice: neither signs nor null vectors.
        null = sigma <= 64 * torch.finfo(sigma.dtype).eps * sigma[..., :1]
        sign = left.gather(-2, left.abs().argmax(-2, keepdim=True)).sign()
        left = torch.where(null[..., None, :], torch.zeros_like(left), left * sign)
        return Outer(left.mT @ self.G, left.mT @ self.X)


class Sample(ABC):
    """Which entries a kernel is made of."""

    @abstractmethod
    def of(self, rows: Rows) -> Rows:
        """The sampled rows."""

    @abstractmethod
    def pick(self, J: Tensor, j: Tensor | None = None) -> Tensor:
        """The same entries of a gradient (c, d_G, d_A), whose last column may be apart from it (c, d_G)."""


@dataclass(frozen=True, eq=False)
class Everything(Sample):
    """No sampling."""

    def of(self, rows: Rows) -> Rows:
        """All."""
        return rows

    def pick(self, J: Tensor, j: Tensor | None = None) -> Tensor:
        """All."""
        return _joined(J, j)


@dataclass(frozen=True, eq=False)
class Places(Sample):
    """Some entries of every row."""

    places: Tensor

    def of(self, rows: Rows) -> Rows:
        """(n, places)."""
        return rows.columns(self.places)

    def pick(self, J: Tensor, j: Tensor | None = None) -> Tensor:
        """(places,)."""
        return _joined(J, j).flatten()[self.places]


@dataclass(frozen=True, eq=False)
class Grid(Sample):
    """Some rows and some columns of every matrix; None: all of them."""

    i: Tensor | None
    j: Tensor | None

    def of(self, rows: Rows) -> Rows:
        """Outer products of some entries."""
        assert isinstance(rows, Outer), "rows that are formed are sampled by their entries"
        return rows.grid(self.i, self.j)

    def pick(self, J: Tensor, j: Tensor | None = None) -> Tensor:
        """(c, i, j); a few rows first, so that nothing of the gradient's size is made."""
        if self.i is not None:
            J, j = J[:, self.i], None if j is None else j[:, self.i]
        J = _joined(J, j)
        return J if self.j is None else J[..., self.j]


@dataclass(frozen=True, eq=False)
class Woodbury:
    """l (l I + U^T U)^-1 J = J - U^T (l I + K)^-1 r, with K = U U^T and r = U J of all entries or, scaled up, of a sample.

    `mixed`: U^T b by the published stand-in.
    """

    rows: Rows
    sample: Sample
    seen: Rows  # what K and r are made of: the sample of the rows
    values: Float[Tensor, " n"]  # of K, descending, float64
    vectors: Float[Tensor, "n n"]
    mixed: bool = False

    @property
    def share(self) -> float:
        """Entries that one of the sampled entries stands for: D / q."""
        return self.rows.entries / self.seen.entries

    def solve(self, J: Tensor, damping: Tensor) -> Tensor:
        """l times the solution; `damping` is the one inside of (l I + K)^-1, one float64 number."""
        if self.mixed:
            return torch.baddbmm(J, *self.thin(J, None, damping))
        return self.rows.back(-self._b(J, None, damping).to(J.dtype), J)

    def thin(self, J: Tensor, j: Tensor | None, damping: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to [J | j] for l times the solution, as the product of two thin matrices; of mixed samples."""
        assert self.mixed
        assert isinstance(self.rows, Outer), "rows that are formed are not mixed"
        return self.rows.mixed(-self._b(J, j, damping).to(J.dtype))

    def _b(self, J: Tensor, j: Tensor | None, damping: Tensor) -> Tensor:
        r = self.seen.times(self.sample.pick(J, j)).double() * self.share
        # What rounding cannot tell from zero counts as zero: there r would be rounding alone.
        least = len(r) * torch.finfo(J.dtype).eps * self.values[0]
        inverse = torch.where(self.values > least, 1 / (self.values + damping), torch.zeros_like(self.values))
        return self.vectors @ (inverse * (self.vectors.mT @ r))

    def multiply(self, D: Tensor) -> Tensor:
        """U^T U D, of all entries."""
        return self.rows.back(self.rows.times(D), torch.zeros_like(D))


def _joined(J: Tensor, j: Tensor | None) -> Tensor:
    return J if j is None else torch.cat([J, j[..., None]], dim=-1)


def woodbury(rows: Rows, sample: Sample, mixed: bool, name: str) -> Woodbury:
    """The eigendecomposition of the (scaled) kernel: 2 n^2 q flops for q sampled entries of n rows, and about 9 n^3."""
    seen = sample.of(rows)
    kernel = seen.kernel().double() * (rows.entries / seen.entries)
    values, vectors = eigenpairs((kernel + kernel.mT) / 2, name)
    return Woodbury(rows, sample, seen, values.clamp_min(0.0), vectors, mixed)

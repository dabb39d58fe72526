"""Symmetric matrices whose upper triangle is the truth: it alone is summed and saved, and mirrored when it is read.

Strips are the blocks on and above the diagonal, one tensor for each block row, (..., rows, d - begin): its shape tells
where a strip belongs. The entries of a strip that lie below the diagonal mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

STRIP = 160  # rows of a strip: thinner ones save few flops more, and each is a product of its own
MOST_STRIPS = 16


def edges(d: int) -> list[int]:
    """Where strips of a d x d matrix begin and end."""
    count = max(1, min(MOST_STRIPS, d // STRIP))
    return [d * i // count for i in range(count + 1)]


def strips_of(matrix: Tensor) -> list[Tensor]:
    """The strips of a matrix, as views."""
    cuts = edges(matrix.shape[-1])
    return [matrix] if len(cuts) == 2 else [matrix[..., begin:end, begin:] for begin, end in pairwise(cuts)]


def strip_elements(d: int) -> int:
    """Entries of all strips: little more than half of d^2 where d is large."""
    return sum((end - begin) * (d - begin) for begin, end in pairwise(edges(d)))


def gram(rows: Tensor, weight: float) -> list[Tensor]:
    """weight * rows^T rows in strips of their own."""
    d = rows.shape[-1]
    made = [rows[..., begin:end].mT @ rows[..., begin:] for begin, end in pairwise(edges(d))]
    return made if weight == 1.0 else [strip.mul_(weight) for strip in made]


def add_gram(strips: Sequence[Tensor], rows: Tensor, keep: float, take: float) -> None:
    """X <- keep * X + take * rows^T rows, in place; torch has no symmetric rank-n update."""
    d = rows.shape[-1]
    for strip in strips:
        begin, end = d - strip.shape[-1], d - strip.shape[-1] + strip.shape[-2]
        # Small layers are all overhead: no views where there is but one strip.
        left, right = (rows, rows) if end - begin == d else (rows[..., begin:end], rows[..., begin:])
        left = left.mT
        (strip.addmm_ if strip.ndim == 2 else strip.baddbmm_)(left, right, beta=keep, alpha=take)


def add_strips(matrix: Tensor, strips: Sequence[Tensor], keep: float, take: float) -> None:
    """X <- keep * X + take * the strips, in place, whatever their heights."""
    d = matrix.shape[-1]
    for strip in strips:
        begin = d - strip.shape[-1]
        own = matrix[..., begin : begin + strip.shape[-2], begin:]
        own.mul_(keep).add_(strip.to(matrix), alpha=take)


def mirror(matrix: Tensor) -> None:
    """Copy the upper triangle onto the lower one, in place: symmetric to the last bit."""
    for begin, end in pairwise(edges(matrix.shape[-1])):
        corner = matrix[..., begin:end, begin:end]
        corner.copy_(corner.triu() + corner.triu(1).mT)
        matrix[..., end:, begin:end] = matrix[..., begin:end, end:].mT


def folded(matrix: Tensor) -> Tensor:
    """The upper triangle in a rectangle of d (d + 1) / 2 entries: what the upper rows leave free takes the lower ones.

    (LAPACK's rectangular full packed format: two block copies instead of an index for every entry.)
    """
    d = matrix.shape[-1]
    packed = matrix.new_zeros(*matrix.shape[:-2], *folded_shape(d))
    half, even = (d + 1) // 2, 1 - d % 2
    packed[..., even:].copy_(matrix[..., :half, :]).triu_()
    packed[..., 1 - even :, : d - half] += matrix[..., half:, half:].triu().mT
    return packed


def unfolded(packed: Tensor, d: int) -> Tensor:
    """The whole matrix from its folded upper triangle."""
    matrix = packed.new_zeros(*packed.shape[:-2], d, d)
    half, even = (d + 1) // 2, 1 - d % 2
    matrix[..., :half, :] = packed[..., even:].triu()
    matrix[..., half:, half:] = packed[..., 1 - even :, : d - half].tril().mT
    mirror(matrix)
    return matrix


def folded_shape(d: int) -> tuple[int, int]:
    """Of the rectangle that holds the upper triangle of a d x d matrix."""
    return (d + 1) // 2, d + 1 - d % 2

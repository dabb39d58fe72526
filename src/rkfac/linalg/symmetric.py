"""Symmetric matrices whose upper triangle is the truth: it alone is summed, kept and saved, and mirrored when it is read.

Strips are the blocks on and above the diagonal, one tensor for each block row, (..., rows, d - begin): its shape tells
where a strip belongs. The entries of a strip that lie below the diagonal mean nothing. A flat tensor holds all strips one
after the other, (..., strip_elements(d)).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

STRIP = 160  # rows of a strip: thinner ones save few flops more, and each is a product of its own
MOST_STRIPS = 16


def edges(d: int) -> list[int]:
    """Where strips of a d x d matrix begin and end."""
    count = max(1, min(MOST_STRIPS, d // STRIP))
    return [d * i // count for i in range(count + 1)]


def strip_elements(d: int) -> int:
    """Entries of all strips: little more than half of d^2 where d is large."""
    return sum((end - begin) * (d - begin) for begin, end in pairwise(edges(d)))


def strips_of(flat: Tensor, d: int) -> list[Tensor]:
    """The strips of a d x d matrix in a flat tensor, as views."""
    shapes = [(end - begin, d - begin) for begin, end in pairwise(edges(d))]
    parts = flat.split([rows * columns for rows, columns in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def gram(rows: Tensor, weight: float) -> list[Tensor]:
    """weight * rows^T rows in strips of their own."""
    d = rows.shape[-1]
    made = [rows[..., begin:end].mT @ rows[..., begin:] for begin, end in pairwise(edges(d))]
    return made if weight == 1.0 else [strip.mul_(weight) for strip in made]


def add_gram(strips: Sequence[Tensor], rows: Tensor, keep: float, take: float) -> None:
    """X <- keep * X + take * rows^T rows, in place; torch has no symmetric rank-n update."""
    d = rows.shape[-1]
    for strip in strips:
        begin, end = _reach(strip, d)
        # Small layers are all overhead: no views where there is but one strip.
        left, right = (rows, rows) if end - begin == d else (rows[..., begin:end], rows[..., begin:])
        left = left.mT
        (strip.addmm_ if strip.ndim == 2 else strip.baddbmm_)(left, right, beta=keep, alpha=take)


def add_strips(strips: Sequence[Tensor], others: Sequence[Tensor], keep: float, take: float) -> None:
    """X <- keep * X + take * the others, in place, however either is cut."""
    d = strips[0].shape[-1]
    for strip in strips:
        strip.mul_(keep)
        begin, end = _reach(strip, d)
        for other in others:
            first, last = _reach(other, d)
            # Rows that both have are a strip again, from the diagonal on: what one of them has before it is below that.
            top, bottom = max(begin, first), min(end, last)
            if top < bottom:
                own = strip[..., top - begin : bottom - begin, top - begin :]
                own.add_(other[..., top - first : bottom - first, top - first :].to(own), alpha=take)


def _reach(strip: Tensor, d: int) -> tuple[int, int]:
    """The rows of a d x d matrix that a strip holds: from, up to."""
    begin = d - strip.shape[-1]
    return begin, begin + strip.shape[-2]


def mirrored(flat: Tensor, d: int) -> Tensor:
    """The whole matrix, symmetric to the last bit, in memory of its own."""
    matrix = flat.new_empty(*flat.shape[:-1], d, d)
    for strip in strips_of(flat, d):
        begin, end = _reach(strip, d)
        corner, right = strip[..., : end - begin], strip[..., end - begin :]
        matrix[..., begin:end, begin:end] = corner.triu() + corner.triu(1).mT
        matrix[..., begin:end, end:] = right
        matrix[..., end:, begin:end] = right.mT
    return matrix


def packed(flat: Tensor, d: int) -> Tensor:
    """The d (d + 1) / 2 entries on and above the diagonal, (..., d (d + 1) / 2), in one pass: what is sent to others."""
    parts = []
    for strip in strips_of(flat, d):
        rows = strip.shape[-2]
        i, j = torch.triu_indices(rows, rows, device=flat.device)
        parts += [strip[..., i, j], strip[..., rows:].flatten(-2)]
    return torch.cat(parts, -1)


def unpacked(entries: Tensor, d: int) -> Tensor:
    """The flat strips from the entries on and above the diagonal."""
    flat = entries.new_zeros(*entries.shape[:-1], strip_elements(d))
    at = 0
    for strip in strips_of(flat, d):
        rows, columns = strip.shape[-2:]
        i, j = torch.triu_indices(rows, rows, device=flat.device)
        corner, right = len(i), rows * (columns - rows)
        strip[..., i, j] = entries[..., at : at + corner]
        strip[..., rows:] = entries[..., at + corner : at + corner + right].unflatten(-1, (rows, columns - rows))
        at += corner + right
    return flat


def packed_elements(d: int) -> int:
    """How many they are."""
    return d * (d + 1) // 2


def folded(flat: Tensor, d: int) -> Tensor:
    """The upper triangle in a rectangle of d (d + 1) / 2 entries: what the upper rows leave free takes the lower ones.

    (LAPACK's rectangular full packed format: two block copies instead of an index for every entry.)
    """
    matrix = mirrored(flat, d)
    packed = flat.new_zeros(*flat.shape[:-1], *folded_shape(d))
    half, even = (d + 1) // 2, 1 - d % 2
    packed[..., even:].copy_(matrix[..., :half, :]).triu_()
    packed[..., 1 - even :, : d - half] += matrix[..., half:, half:].triu().mT
    return packed


def unfolded(packed: Tensor, d: int) -> Tensor:
    """The flat strips from the folded upper triangle."""
    matrix = packed.new_zeros(*packed.shape[:-2], d, d)
    half, even = (d + 1) // 2, 1 - d % 2
    matrix[..., :half, :] = packed[..., even:].triu()
    matrix[..., half:, half:] = packed[..., 1 - even :, : d - half].tril().mT
    return torch.cat([matrix[..., begin:end, begin:].flatten(-2) for begin, end in pairwise(edges(d))], -1)


def folded_shape(d: int) -> tuple[int, int]:
    """Of the rectangle that holds the upper triangle of a d x d matrix."""
    return (d + 1) // 2, d + 1 - d % 2

"""The second moment of a convolution's patches without patches, from the input's own autocorrelations.

For two taps u and v of the kernel, sum_p x[p + u] x[p + v]^T over output positions p depends, but for the borders of the
window that p + u runs over, on v - u alone. A kernel of 3 x 3 has 45 pairs of taps and 13 differences: the window common
to all pairs of one difference is summed once, and each pair adds its own border. Nothing is ever subtracted, so that no
digits are lost where a border is far larger than the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, product

import torch
from torch import Tensor

from rkfac.layers.base import MAX_CHUNK

Window = tuple[int, int]  # from, up to
STRIP, MOST_STRIPS = 160, 8  # rows of the moment that are kept together, from the diagonal on
NARROW = 16  # channels below which a product takes no less time


@dataclass(frozen=True)
class Axis:
    """One dimension of a convolution of stride one: x has `size` entries, zero outside of them."""

    size: int
    kernel: int
    dilation: int
    before: int  # zeros in front of it
    outputs: int

    def windows(self, difference: int) -> list[tuple[int, Window]]:
        """Taps a for which a + difference is one too, and where x[q] x[q + shift] counts for that pair (maybe nowhere)."""
        shift = difference * self.dilation
        found = []
        for tap in range(max(0, -difference), min(self.kernel, self.kernel - difference)):
            begin = tap * self.dilation - self.before
            low, high = max(0, begin, -shift), min(self.size, begin + self.outputs, self.size - shift)
            found.append((tap, (low, max(low, high))))
        return found

    def pieces(self, difference: int) -> list[Window]:
        """What windows of one difference are made of: their common core, and borders that some of them have."""
        ends = sorted({end for _, window in self.windows(difference) for end in window})
        return list(pairwise(ends))


Plane = tuple[Axis, Axis]


def differences(axes: Plane) -> Iterator[tuple[int, int]]:
    """Half of all v - u: the others are their negatives."""
    rows, columns = axes
    return ((i, j) for i in range(rows.kernel) for j in range(1 - columns.kernel, columns.kernel) if i > 0 or j >= 0)


def pays(samples: int, channels: int, axes: Plane) -> bool:
    """Whether this is faster than a product of patches, by a count of multiplications and what the rest was measured at.

    On one core, fitted to a dozen layers, in the time of one multiplication: writing an entry of the moment 150 (its
    blocks are scattered over it), handling a pair of taps 1 200 000, making an entry of a patch 300.
    """
    rows, columns = axes
    taps, outputs = rows.kernel * columns.kernel, rows.outputs * columns.outputs
    d = channels * taps
    pairs = sum(_length(rows.pieces(i)) * _length(columns.pieces(j)) for i, j in differences(axes))
    here = samples * pairs * max(channels, NARROW) ** 2 + 150 * d**2 + 1_200_000 * taps**2
    return taps > 1 and here < samples * outputs * (d**2 / 2 + 300 * d)


def _length(windows: list[Window]) -> int:
    return sum(end - begin for begin, end in windows)


@dataclass(frozen=True)
class Correlation:
    """sum x[q] x[q + shift]^T over windows of q; x is (rows, columns, samples, channels), so that no slice is copied."""

    x: Tensor
    shift: tuple[int, int]
    pieces: tuple[list[Window], list[Window]]
    _known: dict[tuple[Window, Window], Tensor] = field(default_factory=dict)

    def over(self, rows: Window, columns: Window) -> Tensor:
        """(channels, channels)."""
        inside = product(_within(rows, self.pieces[0]), _within(columns, self.pieces[1]))
        found = [self._over_piece(*piece) for piece in inside]
        if len(found) == 1:
            return found[0]
        total = self.x.new_zeros(self.x.shape[-1], self.x.shape[-1])
        for piece in found:
            total += piece
        return total

    def _over_piece(self, rows: Window, columns: Window) -> Tensor:
        key = rows, columns
        if key not in self._known:
            channels, (i, j) = self.x.shape[-1], self.shift
            left = self.x[slice(*rows), slice(*columns)].flatten(1, 2)
            right = self.x[rows[0] + i : rows[1] + i, columns[0] + j : columns[1] + j].flatten(1, 2)
            self._known[key] = self.x.new_zeros(channels, channels).addbmm_(left.mT, right)
        return self._known[key]


def _within(window: Window, pieces: list[Window]) -> list[Window]:
    return [(begin, end) for begin, end in pieces if window[0] <= begin and end <= window[1]]


def strips(x: Tensor, pad: Callable[[Tensor], Tensor], axes: Plane, bias: bool, unit: Tensor) -> list[Tensor]:
    """The second moment of unit * (patch, 1) for pad(x) (samples, channels, rows, columns), upper block rows alone.

    Columns are in the weight's order (channel, kernel), then the bias. Each strip holds whole channels, (rows, d - begin).
    """
    channels, taps = x.shape[1], axes[0].kernel * axes[1].kernel
    count = max(1, min(MOST_STRIPS, channels * taps // STRIP, channels))
    cuts = [channels * i // count for i in range(count + 1)]
    d = channels * taps + bias
    made = [unit.new_zeros((end - begin) * taps, d - begin * taps) for begin, end in pairwise(cuts)]
    chunk = max(1, MAX_CHUNK // (channels * axes[0].size * axes[1].size))
    for part in map(pad, x.to(unit.dtype).split(chunk)):
        # BLAS sums products of few columns one by one: over 10^4 samples float32 would lose three digits.
        dtype = torch.float64 if channels < NARROW else unit.dtype
        laid = unit.new_empty(*part.shape[2:], part.shape[0], channels, dtype=dtype)
        laid.copy_(part.permute(2, 3, 0, 1)).mul_(unit)
        _add_blocks(made, cuts, laid, axes)
        if bias:
            _add_bias(made, cuts, laid, axes, unit)
    if bias:
        corner = (unit.square() * (x.shape[0] * axes[0].outputs * axes[1].outputs)).expand(1, 1)
        made.append(corner.clone())
    return made


def _add_blocks(made: list[Tensor], cuts: list[int], laid: Tensor, axes: Plane) -> None:
    rows, columns = axes
    channels, taps = cuts[-1], rows.kernel * columns.kernel
    blocks = [  # (channels, taps, channels, taps) without the bias
        strip[:, : (channels - begin) * taps].unflatten(1, (-1, taps)).unflatten(0, (-1, taps))
        for strip, begin in zip(made, cuts, strict=False)
    ]
    for i, j in differences(axes):
        shift = i * rows.dilation, j * columns.dilation
        correlation = Correlation(laid, shift, (rows.pieces(i), columns.pieces(j)))
        for (a, own_rows), (b, own_columns) in product(rows.windows(i), columns.windows(j)):
            block = correlation.over(own_rows, own_columns)
            u, v = a * columns.kernel + b, (a + i) * columns.kernel + b + j
            mirrored = block.mT.contiguous() if u != v else None
            for strip, (begin, end) in zip(blocks, pairwise(cuts), strict=True):
                strip[:, u, :, v] += block[begin:end, begin:]
                if mirrored is not None:
                    strip[:, v, :, u] += mirrored[begin:end, begin:]


def _add_bias(made: list[Tensor], cuts: list[int], laid: Tensor, axes: Plane, unit: Tensor) -> None:
    """The last column: sums of patches."""
    of_samples = laid.sum(2)
    taps = product(axes[0].windows(0), axes[1].windows(0))
    sums = torch.stack([of_samples[slice(*r), slice(*c)].sum((0, 1)) for (_, r), (_, c) in taps], dim=1) * unit
    for strip, (begin, end) in zip(made, pairwise(cuts), strict=True):
        strip[:, -1] += sums[begin:end].flatten()

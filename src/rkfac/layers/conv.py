"""Convolutions in one, two and three dimensions: any stride, dilation, padding mode and number of groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkfac.compat import padding_of
from rkfac.layers.autocorrelation import Axis, pays, strips
from rkfac.layers.base import (
    MAX_CHUNK,
    KroneckerAdapter,
    append_one,
    statistics_dtype,
    sum_of_positions,
)
from rkfac.layers.registry import register

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

# Where the value at a coordinate of the padded input comes from, in an input of `size`.
SOURCES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "zeros": lambda at, size: at.clamp(0, size - 1),  # any place will do: what is moved here is set to zero
    "replicate": lambda at, size: at.clamp(0, size - 1),
    "reflect": lambda at, size: size - 1 - (size - 1 - at.abs()).abs(),
    "circular": lambda at, size: at % size,
}


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvAdapter(KroneckerAdapter):
    """A Linear layer on every patch; groups are independent layers of their own."""

    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Patches in the weight's order (channel, kernel), a chunk of samples (or of drawn patches) at a time."""
        conv = cast(Conv, module)
        dtype, x = statistics_dtype(x), _batched(conv, x)
        width = conv.in_channels * math.prod(conv.kernel_size)
        if drawn is not None and sharing != "reduce":
            for chosen in drawn.split(max(1, MAX_CHUNK // width)):
                rows = _drawn_patches(conv, x, chosen).to(dtype)  # (groups, n, d)
                yield append_one(rows if conv.groups > 1 else rows[0], bias)
            return
        x = (x if drawn is None else x[drawn]).to(dtype)
        positions = math.prod(_output_size(conv, x))
        chunk = max(1, MAX_CHUNK // (positions * width))
        for part in x.split(chunk):
            rows = _patches(conv, part)  # (groups, n, positions, d)
            rows = rows.mean(2) if sharing == "reduce" else rows.flatten(1, 2)
            yield append_one(rows if conv.groups > 1 else rows[0], bias)

    def input_moment(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str
    ) -> Callable[[Tensor], list[Tensor]] | None:
        """From autocorrelations of the input: one or two dimensions, stride one, no groups."""
        conv = cast(Conv, module)
        if sharing == "reduce" or conv.groups > 1 or any(s != 1 for s in conv.stride) or len(conv.kernel_size) > 2:
            return None
        x = _batched(conv, x)
        axes = _axes(conv, x)
        if not pays(x.shape[0], conv.in_channels, axes):
            return None
        return partial(strips, x, partial(_as_plane, conv), axes, bias)

    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """Gradients at the output, a row a position, channels of one group together."""
        conv = cast(Conv, module)
        dtype, g = statistics_dtype(g), _batched(conv, g).flatten(2)
        if drawn is not None and sharing != "reduce":
            g = g[drawn // g.shape[2], :, drawn % g.shape[2]][..., None]  # each drawn position on its own
        elif drawn is not None:
            g = g[drawn]
        rows = g.to(dtype).unflatten(1, (conv.groups, -1)).permute(1, 0, 3, 2)  # (groups, n, positions, d)
        rows = sum_of_positions(rows, 2, g.dtype) if sharing == "reduce" else rows.flatten(1, 2)
        return rows if conv.groups > 1 else rows[0]

    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """Positions of all samples, or samples."""
        g = _batched(cast(Conv, module), g)
        return g.shape[0] if sharing == "reduce" else g.numel() // g.shape[1]

    def input_shape(self, module: nn.Module, bias: bool) -> tuple[int, ...]:
        """([groups,] channels of a group x kernel [+ 1])."""
        conv = cast(Conv, module)
        d = conv.in_channels // conv.groups * math.prod(conv.kernel_size) + bias
        return (conv.groups, d) if conv.groups > 1 else (d,)

    def output_shape(self, module: nn.Module) -> tuple[int, ...]:
        """([groups,] output channels of a group)."""
        conv = cast(Conv, module)
        d = conv.out_channels // conv.groups
        return (conv.groups, d) if conv.groups > 1 else (d,)

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """([groups,] outputs of a group, channels x kernel)."""
        groups = cast(Conv, module).groups
        return weight.reshape(groups, weight.shape[0] // groups, -1) if groups > 1 else weight.flatten(1)

    def columns(self, module: nn.Module) -> Tensor | None:
        """Channels come last in a channels_last weight."""
        conv = cast(Conv, module)
        if not _channels_last(conv.weight):
            return None
        channels = conv.in_channels // conv.groups
        places = torch.arange(channels * math.prod(conv.kernel_size), device=conv.weight.device)
        return places.view(channels, -1).mT.flatten()

    def stored(self, module: nn.Module, weight: Tensor) -> Tensor:
        """([groups,] outputs of a group, kernel x channels) for a channels_last weight."""
        conv = cast(Conv, module)
        if _channels_last(conv.weight):
            weight = weight.movedim(1, -1)
        return self.matrix(module, weight)

    def samples(self, module: nn.Module, x: Tensor) -> int | None:
        """The first dimension of a batch; an image alone is one sample."""
        return _batched(cast(Conv, module), x).shape[0]

    def vector(self, module: nn.Module, bias: Tensor) -> Tensor:
        """([groups,] outputs of a group)."""
        groups = cast(Conv, module).groups
        return bias.reshape(groups, -1) if groups > 1 else bias


def _channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.movedim(1, -1).is_contiguous()


def _batched(conv: Conv, x: Tensor) -> Tensor:
    return x if x.ndim == len(conv.kernel_size) + 2 else x[None]


def _output_size(conv: Conv, x: Tensor) -> list[int]:
    padding = padding_of(conv)
    sizes = []
    for i, (size, kernel) in enumerate(zip(x.shape[2:], conv.kernel_size, strict=True)):
        at = 2 * (len(conv.kernel_size) - 1 - i)  # F.pad lists dimensions from the last to the first
        padded = size + padding[at] + padding[at + 1]
        sizes.append((padded - conv.dilation[i] * (kernel - 1) - 1) // conv.stride[i] + 1)
    return sizes


def _padded(conv: Conv, x: Tensor) -> Tensor:
    padding = padding_of(conv)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, padding, mode=mode) if any(padding) else x


def _as_plane(conv: Conv, x: Tensor) -> Tensor:
    """(n, channels, rows, columns); zeros around it are known to the axes."""
    x = x if conv.padding_mode == "zeros" else _padded(conv, x)
    return x if x.ndim == 4 else x[:, :, None]


def _axes(conv: Conv, x: Tensor) -> tuple[Axis, Axis]:
    """Of a convolution of stride one; a line is a plane of one row."""
    padding, axes = padding_of(conv), []
    for i, (size, outputs) in enumerate(zip(x.shape[2:], _output_size(conv, x), strict=True)):
        at = 2 * (len(conv.kernel_size) - 1 - i)
        around = padding[at], padding[at + 1]
        if conv.padding_mode != "zeros":
            size, around = size + sum(around), (0, 0)  # padded with something that counts
        axes.append(Axis(size, conv.kernel_size[i], conv.dilation[i], around[0], outputs))
    return axes[-2] if len(axes) > 1 else Axis(1, 1, 1, 0, 1), axes[-1]


def _patches(conv: Conv, x: Tensor) -> Tensor:
    """(groups, n, positions, channels of a group x kernel): a strided view of the padded input, copied once."""
    size = _output_size(conv, x)
    x = _padded(conv, x)
    n, channels = x.shape[:2]
    per_group = channels // conv.groups
    spatial = x.stride()[2:]
    shape = (conv.groups, n, *size, per_group, *conv.kernel_size)
    strides = (
        x.stride(1) * per_group,
        x.stride(0),
        *(s * step for s, step in zip(spatial, conv.stride, strict=True)),
        x.stride(1),
        *(s * step for s, step in zip(spatial, conv.dilation, strict=True)),
    )
    view = x.as_strided(shape, strides, x.storage_offset())
    return view.reshape(conv.groups, n, math.prod(size), -1)


def _drawn_patches(conv: Conv, x: Tensor, drawn: Tensor) -> Tensor:
    """(groups, drawn, channels of a group x kernel): gathered from the input itself, which is neither padded nor unfolded."""
    sample, *corner = torch.unravel_index(drawn, (x.shape[0], *_output_size(conv, x)))
    padding = padding_of(conv)
    place = drawn.new_zeros(len(drawn), 1)  # in the flattened input, (drawn, kernel)
    moved = torch.zeros_like(place, dtype=torch.bool)
    for i, (size, kernel) in enumerate(zip(x.shape[2:], conv.kernel_size, strict=True)):
        taps = torch.arange(kernel, device=x.device) * conv.dilation[i] - padding[2 * (len(conv.kernel_size) - 1 - i)]
        at = corner[i][:, None] * conv.stride[i] + taps
        source = SOURCES[conv.padding_mode](at, size)
        place = (place[..., None] * size + source[:, None]).flatten(1)
        moved = (moved[..., None] | (source != at)[:, None]).flatten(1)
    patches = x.flatten(2)[sample[:, None], :, place]  # (drawn, kernel, channels)
    if conv.padding_mode == "zeros" and any(padding):
        patches.masked_fill_(moved[..., None], 0)
    return patches.unflatten(-1, (conv.groups, -1)).permute(2, 0, 3, 1).flatten(2)

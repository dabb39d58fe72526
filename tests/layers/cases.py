"""Every layer the package covers, one line a case: a new layer, or a new option of one, is one line more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

from layers.lookalikes import Conv1D, OwnRMSNorm, ShiftedRMSNorm


@dataclass(frozen=True)
class Case:
    """A module and the shape of its input; `layout` is a memory format for both."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    layout: torch.memory_format = torch.contiguous_format

    def module(self) -> nn.Module:
        """In float64, parameters away from their special starting values, one of them exactly zero."""
        module = self.build().double()
        with torch.no_grad():
            for p in module.parameters():
                p.normal_()
                p.view(-1)[0] = 0.0  # a scale of zero must not spoil a norm's statistics
        return module.to(memory_format=self.layout)

    def x(self) -> Tensor:
        """An input; every second index of an embedding repeats."""
        module = self.build()
        if isinstance(module, nn.Embedding):
            return torch.randint(0, module.num_embeddings // 2, self.shape)
        return torch.randn(self.shape, dtype=torch.float64).contiguous(memory_format=self.layout)


LAST = torch.channels_last
CASES = [
    Case("linear 1-D", lambda: nn.Linear(4, 3), (4,)),
    Case("linear 2-D", lambda: nn.Linear(4, 3), (5, 4)),
    Case("linear 3-D", lambda: nn.Linear(4, 3), (5, 2, 4)),
    Case("linear 4-D", lambda: nn.Linear(4, 3), (5, 2, 3, 4)),
    Case("linear no bias 1-D", lambda: nn.Linear(4, 3, bias=False), (4,)),
    Case("linear no bias 2-D", lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    Case("linear no bias 4-D", lambda: nn.Linear(4, 3, bias=False), (5, 2, 3, 4)),
    Case("conv1d", lambda: nn.Conv1d(2, 3, 3), (4, 2, 7)),
    Case("conv1d stride dilation pad", lambda: nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=3), (4, 2, 9)),
    Case("conv1d same dilation", lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=2), (4, 2, 9)),
    Case("conv1d circular", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (4, 2, 7)),
    Case("conv1d reflect", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (4, 2, 7)),
    Case("conv1d replicate", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="replicate"), (4, 2, 7)),
    Case("conv1d depthwise", lambda: nn.Conv1d(3, 6, 3, groups=3), (4, 3, 7)),
    Case("conv1d unbatched", lambda: nn.Conv1d(2, 3, 3), (2, 7)),
    Case("conv2d", lambda: nn.Conv2d(2, 3, 3), (4, 2, 6, 5)),
    Case("conv2d no bias", lambda: nn.Conv2d(2, 3, (3, 2), bias=False), (4, 2, 6, 5)),
    Case("conv2d 1x1 no bias", lambda: nn.Conv2d(3, 2, 1, bias=False), (4, 3, 5, 4)),
    Case("conv2d stride", lambda: nn.Conv2d(2, 3, 3, stride=(2, 3)), (4, 2, 8, 9)),
    Case("conv2d dilation", lambda: nn.Conv2d(2, 3, 3, dilation=(2, 1)), (4, 2, 8, 6)),
    Case("conv2d int padding", lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 4)),
    Case("conv2d tuple padding", lambda: nn.Conv2d(2, 3, (3, 5), padding=(0, 2)), (4, 2, 5, 4)),
    Case("conv2d same, uneven", lambda: nn.Conv2d(2, 3, (2, 4), padding="same"), (4, 2, 5, 6)),
    Case("conv2d valid", lambda: nn.Conv2d(2, 3, 3, padding="valid"), (4, 2, 5, 6)),
    Case("conv2d reflect", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (4, 2, 5, 6)),
    Case("conv2d replicate", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"), (4, 2, 5, 6)),
    Case("conv2d circular", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), (4, 2, 5, 6)),
    Case("conv2d circular same", lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"), (4, 2, 5, 6)),
    Case("conv2d groups", lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1), (4, 4, 5, 6)),
    Case("conv2d groups no bias", lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 4, 5, 6)),
    Case("conv2d depthwise", lambda: nn.Conv2d(3, 3, 3, groups=3, padding=1), (4, 3, 5, 6)),
    Case("conv2d depthwise x2", lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1), (4, 3, 5, 6)),
    Case("conv2d unbatched", lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    Case("conv2d channels_last", lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 6), LAST),
    Case("conv2d channels_last 1x1", lambda: nn.Conv2d(3, 2, 1, bias=False), (4, 3, 5, 4), LAST),
    Case("conv2d channels_last groups", lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, 4, 5, 6), LAST),
    Case("conv3d", lambda: nn.Conv3d(2, 3, 2), (3, 2, 4, 3, 5)),
    Case("conv3d all", lambda: nn.Conv3d(2, 4, (1, 2, 3), (2, 1, 1), (1, 0, 2), (1, 2, 1), 2), (3, 2, 4, 5, 3)),
    Case("conv3d replicate", lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="replicate"), (3, 2, 3, 3, 4)),
    Case("conv3d unbatched", lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 5)),
    Case("embedding 1-D", lambda: nn.Embedding(9, 4), (7,)),
    Case("embedding 2-D", lambda: nn.Embedding(9, 4), (5, 6)),
    Case("embedding 3-D", lambda: nn.Embedding(9, 4), (2, 3, 4)),
    Case("embedding padded", lambda: nn.Embedding(9, 4, padding_idx=1), (5, 6)),
    Case("embedding padded from the end", lambda: nn.Embedding(4, 3, padding_idx=-4), (5, 6)),
    Case("batchnorm1d 2-D", lambda: nn.BatchNorm1d(3), (6, 3)),
    Case("batchnorm1d 3-D", lambda: nn.BatchNorm1d(3), (6, 3, 4)),
    Case("batchnorm2d", lambda: nn.BatchNorm2d(3, eps=0.1), (5, 3, 4, 2)),
    Case("batchnorm2d channels_last", lambda: nn.BatchNorm2d(3), (5, 3, 4, 2), LAST),
    Case("batchnorm3d", lambda: nn.BatchNorm3d(3), (5, 3, 4, 2, 2)),
    Case("groupnorm", lambda: nn.GroupNorm(2, 4, eps=0.1), (5, 4, 3, 2)),
    Case("groupnorm 2-D", lambda: nn.GroupNorm(2, 4), (5, 4)),
    Case("layernorm", lambda: nn.LayerNorm(4, eps=0.1), (5, 4)),
    Case("layernorm 3-D", lambda: nn.LayerNorm(4), (5, 3, 4)),
    Case("layernorm 1-D", lambda: nn.LayerNorm(4), (4,)),
    Case("layernorm two dimensions", lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
    Case("layernorm whole sample", lambda: nn.LayerNorm((3, 4)), (5, 3, 4)),
    Case("layernorm unbatched", lambda: nn.LayerNorm((3, 4)), (3, 4)),
    Case("layernorm no shift", lambda: nn.LayerNorm(4, bias=False), (5, 3, 4)),
    Case("rmsnorm", lambda: nn.RMSNorm(4, eps=0.1), (5, 3, 4)),
    Case("rmsnorm two dimensions", lambda: nn.RMSNorm((3, 4)), (5, 2, 3, 4)),
    Case("transposed linear 1-D", lambda: Conv1D(3, 4), (4,)),
    Case("transposed linear 2-D", lambda: Conv1D(3, 4), (5, 4)),
    Case("transposed linear 4-D", lambda: Conv1D(3, 4), (5, 2, 3, 4)),
    Case("rmsnorm of somebody's own", lambda: OwnRMSNorm(4, eps=0.1), (5, 3, 4)),
    Case("rmsnorm of somebody's own 1-D", lambda: OwnRMSNorm(4), (4,)),
    Case("rmsnorm, scales 1 + weight", lambda: ShiftedRMSNorm(4, eps=1e-3), (5, 3, 4)),
]

each_case = pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))


LAYOUTS = ("contiguous", "channels last", "strided")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order of memory."""
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "strided" else x

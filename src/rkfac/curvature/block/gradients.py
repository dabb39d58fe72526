"""The gradients of samples, layer by layer: of Linear layers and convolutions, and of norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.samplewise import GradientsBlock
from rkfac.curvature.block.settings import Settings
from rkfac.curvature.samples import FormedPiece, OuterPiece, Piece, unit_for
from rkfac.layers.base import MAX_CHUNK, KroneckerAdapter, UnitAdapter, Use, statistics_dtype
from rkfac.linalg import MEASURED, SAFE, Corrected, Outer, Part, Whole, Woodbury, at_once, shares_memory


class LayerGradients(GradientsBlock):
    """Linear layers and convolutions: u_n = vec(sum over positions of g x^T), formed or as products."""

    def __init__(self, uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> None:
        self.adapter = adapter
        super().__init__(uses, adapter, settings)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weight as a matrix, and the bias."""
        *groups, d_G = self.adapter.output_shape(self.module)
        return (math.prod(groups), d_G, self.adapter.input_shape(self.module, self.bias)[-1])

    def _samples(self, use: Use, x: Tensor, g: Tensor) -> int:
        samples = self.adapter.samples(use.module, x)
        return self.adapter.count(use.module, g, self.settings.weight_sharing) if samples is None else samples

    def _piece(self, use: Use, x: Tensor, g: Tensor, drawn: Tensor | None, weight: float) -> Piece:
        samples = self._samples(use, x, g)
        positions = self.adapter.count(use.module, g, "expand") // samples
        if positions == 1 or not self.explicit:
            inputs, gradients = self._by_sample(use, x, g, drawn)
            return OuterPiece(gradients * math.sqrt(weight), inputs.clone())  # both out of the reach of the model
        if drawn is not None:
            x, g = x[drawn], g[drawn]
        some = samples if samples == 1 else max(1, MAX_CHUNK // (positions * self.shape[-1]))
        unit_x, unit_g = (unit_for(t.to(statistics_dtype(t))) for t in (x, g))
        unit_x = unit_x.clamp_max(1.0) if self.bias else unit_x  # a bias's input is one
        made = []
        for part_x, part_g in zip(x.split(some), g.split(some), strict=True) if samples > 1 else [(x, g)]:
            inputs, gradients = self._by_sample(use, part_x, part_g, None)
            made.append(Outer(gradients * (unit_g * math.sqrt(weight)), inputs * unit_x).formed().U)
        return FormedPiece(torch.cat(made), self.shape, unit_g.double() * unit_x.double())

    def _by_sample(self, use: Use, x: Tensor, g: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
        """(groups, n, positions, d_A) and (groups, n, positions, d_G)."""
        sharing = self.settings.weight_sharing
        inputs, gradients = self.adapter.by_sample(use.module, x, g, self.bias, sharing, drawn)
        return (inputs, gradients) if inputs.ndim == 4 else (inputs[None], gradients[None])

    def _matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.adapter.joined(self.module, tensors, dtype).reshape(self.shape)

    def _tensors(self, matrix: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.adapter.parted(self.module, matrix if self.shape[0] > 1 else matrix[0], like)

    def _thin(
        self, gradients: Sequence[Tensor], inverse: Woodbury, inside: Tensor, damping: Tensor
    ) -> Direction | None:
        dtype, matrix = statistics_dtype(self.weight), partial(self.adapter.matrix, self.module)
        J = matrix(gradients[0])
        if self.shape[0] > 1 or not at_once(J) or J.dtype != dtype or not shares_memory(J, gradients[0]):
            return None
        j = gradients[1] if self.bias else None
        given = math.sqrt(sum(torch.linalg.vector_norm(g).item() ** 2 for g in gradients))
        if not SAFE[0] < given < SAFE[1]:
            return None
        left, right = (t[0] for t in inverse.thin(J[None], None if j is None else j[None], inside))
        seen = left.mT @ J
        inner = (seen * right[:, : J.shape[1]]).sum().item()  # <J, left @ right>
        if j is not None:
            inner += (left.mT @ j * right[:, -1]).sum().item()
        own = ((left.mT @ left) * (right @ right.mT)).double().sum().item()
        square = given * given + 2 * inner + own
        if not square > MEASURED * given * given:  # a difference of large numbers, or none of them
            return None
        parts: tuple[Part, ...] = (Corrected(matrix, 1.0, None, left, right[:, : J.shape[1]]),)
        if j is not None:
            parts = (*parts, Whole(torch.addmv(j, left, right[:, -1])))
        return Direction(
            parts,
            1 / damping.item(),
            J.numel() + (0 if j is None else j.numel()),
            given=lambda: given,
            length=math.sqrt(square),
            along=lambda: given * given + inner,
        )


class NormGradients(GradientsBlock):
    """Norm layers: u_n = [sum g x^, sum g] of a sample, always formed."""

    def __init__(self, uses: Sequence[Use], adapter: UnitAdapter, settings: Settings) -> None:
        self.adapter = adapter
        super().__init__(uses, adapter, settings)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Units, and one or two parameters of each."""
        return (1, self.weight.numel(), 1 + self.bias)

    def _samples(self, use: Use, x: Tensor, g: Tensor) -> int:
        return self.adapter.count(use.module, g, self.settings.weight_sharing)

    def _piece(self, use: Use, x: Tensor, g: Tensor, drawn: Tensor | None, weight: float) -> Piece:
        u = self.adapter.unit_gradients(use.module, x, g, self.settings.weight_sharing, drawn)  # (n, units, k)
        one = torch.ones((), dtype=torch.float64, device=u.device)
        return FormedPiece(u.flatten(1) * math.sqrt(weight), self.shape, one)

    def _matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.stack([t.flatten() for t in tensors], dim=-1).to(dtype)[None]

    def _tensors(self, matrix: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(matrix[0, :, i].reshape(t.shape) for i, t in enumerate(like))

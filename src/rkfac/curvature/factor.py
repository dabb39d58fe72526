"""Running averages of a layer's statistics: one Kronecker factor (dense), a diagonal one, and small unit blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rkfac.linalg import LowRank

WORTH_SPLITTING = 512  # columns below which one product is faster than four


class Average:
    """X <- decay X + (1 - decay) X_k, from the identity (the paper) or free of its start ("unbiased").

    `weight` is the weight the past carries: 1 from the identity on, and from 0 upwards otherwise, which divides out the
    start exactly, also when the decay changes on the way.
    """

    def __init__(self, value: Tensor, weight: float) -> None:
        self.value = value
        self.weight = weight
        self.updates = 0

    def blend(self, decay: float) -> tuple[float, float]:
        """Coefficients of the old value and of the new one for the next update, which is thereby counted."""
        past = decay * self.weight
        self.weight = past + (1 - decay)
        self.updates += 1
        return past / self.weight, (1 - decay) / self.weight

    def state_dict(self) -> dict[str, Tensor | float | int]:
        """Everything needed to go on."""
        return {"value": self.value, "weight": self.weight, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Tensor | float | int]) -> None:
        """Go on from a saved state, on this average's own device."""
        value = state["value"]
        if not isinstance(value, Tensor) or value.shape != self.value.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(f"the saved factor has shape {shape}, this model needs {tuple(self.value.shape)}")
        self.value = value.to(self.value, copy=True)
        self.weight = float(state["weight"])
        self.updates = int(state["updates"])


class Pending:
    """Second moment of the rows seen since the last step, not yet scaled nor averaged.

    Rows are kept as they are while they are smaller than the factor (then one fused product updates the average in
    place, and factored factors can take them as columns), and summed up into a matrix as soon as they are not.
    """

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.moment: Tensor | None = None
        self.count = 0

    def add(self, rows: Tensor, source: Tensor) -> None:
        """Take rows (n, d) or (groups, n, d), which may be a view of `source`."""
        d = rows.shape[-1]
        self.count += rows.shape[-2]
        if self.moment is None and self.count <= d:
            # The source may change in place before the step: an input buffer used again, or an output gradient that
            # autograd handed on as some parameter's .grad, to be added to, unscaled or clipped.
            shared = rows.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            self.rows.append(rows.clone() if shared else rows)
            return
        if self.moment is None:
            self.moment = rows.new_zeros(*rows.shape[:-2], d, d)
            for kept in self.rows:
                _add_gram(self.moment, kept, 1.0, 1.0)
            self.rows.clear()
        _add_gram(self.moment, rows, 1.0, 1.0)

    def size(self) -> Tensor:
        """A number that is finite exactly when everything pending is."""
        parts = [torch.linalg.vector_norm(rows) for rows in self.rows]
        if self.moment is not None:
            parts.append(self.moment.diagonal(dim1=-2, dim2=-1).sum())
        return torch.stack(parts).sum()

    def into(self, value: Tensor, keep: float, take: Tensor | float) -> None:
        """value <- keep * value + take * moment, in place."""
        if self.moment is not None:
            if isinstance(take, Tensor):
                value.mul_(keep).addcmul_(self.moment.to(value), take.to(value))
            else:
                value.mul_(keep).add_(self.moment.to(value), alpha=take)
            return
        for rows in self.rows:
            scaled = rows if not isinstance(take, Tensor) else rows * take.sqrt()
            _add_gram(value, scaled.to(value), keep, 1.0 if isinstance(take, Tensor) else take)
            keep = 1.0


def _add_gram(matrix: Tensor, rows: Tensor, keep: float, take: float) -> None:
    """matrix <- keep * matrix + take * rows^T rows, in place, the matrix being symmetric.

    torch has no symmetric rank-n update; only the blocks on and above the diagonal are multiplied, the others mirrored,
    which saves three eighths of the flops of a full product.
    """
    d = rows.shape[-1]
    if matrix.ndim > 2:
        matrix.baddbmm_(rows.mT, rows, beta=keep, alpha=take)
        return
    if d < WORTH_SPLITTING:
        matrix.addmm_(rows.mT, rows, beta=keep, alpha=take)
        return
    edges = [d * i // 4 for i in range(5)]
    for begin, end in pairwise(edges):
        matrix[begin:end, begin:].addmm_(rows[:, begin:end].mT, rows[:, begin:], beta=keep, alpha=take)
    for begin, end in pairwise(edges):
        matrix[end:, begin:end] = matrix[begin:end, end:].mT


class Factor:
    """One running Kronecker factor with its current decomposition."""

    def __init__(self, shape: tuple[int, ...], identity: bool, like: Tensor) -> None:
        d = shape[-1]
        value = like.new_zeros(*shape[:-1], d, d)
        if identity:
            value.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        self.average = Average(value, 1.0 if identity else 0.0)
        self.low: LowRank | None = None
        self.captured: Tensor | None = None  # share of the trace the kept pairs held when they were made

    def update(self, pending: Pending, decay: float, scale: Tensor | float) -> None:
        """One more statistic: value <- decay value + (1 - decay) scale * rows^T rows."""
        keep, take = self.average.blend(decay)
        pending.into(self.average.value, keep, take * scale)

    def adopt(self, low: LowRank) -> None:
        """Use a fresh decomposition from now on."""
        total = self.average.value.diagonal(dim1=-2, dim2=-1).sum()
        self.low = low
        self.captured = (low.s.sum() / total.clamp_min(torch.finfo(total.dtype).tiny)).clamp(0, 1)

    def spectrum(self) -> Tensor:
        """All eigenvalues of the running average, descending (exact, so O(d^3))."""
        return torch.linalg.eigvalsh(self.average.value.double()).flip(-1).clamp_min(0)


class DiagonalFactor:
    """The input factor of one-hot inputs."""

    def __init__(self, size: int, identity: bool, like: Tensor) -> None:
        start = like.new_ones(size) if identity else like.new_zeros(size)
        self.average = Average(start, 1.0 if identity else 0.0)
        self.low: Tensor | None = None  # the diagonal as of the last refresh

    def adopt(self) -> None:
        """Use the present average from now on, until the next refresh."""
        self.low = self.average.value.clone()

    def update(self, diagonal: Tensor, decay: float, scale: Tensor | float) -> None:
        """One more statistic."""
        keep, take = self.average.blend(decay)
        self.average.value.mul_(keep).add_(diagonal.to(self.average.value) * (take * scale))


class UnitFactor:
    """Fisher blocks (units, k, k) of a scale-and-shift layer."""

    def __init__(self, units: int, k: int, like: Tensor, identity: bool) -> None:
        eye = torch.eye(k, dtype=like.dtype, device=like.device).expand(units, k, k)
        self.average = Average(eye.clone() if identity else torch.zeros_like(eye), 1.0 if identity else 0.0)

    def update(self, moment: Tensor, decay: float, scale: Tensor | float) -> None:
        """One more statistic: (units, k, k) sum of outer products."""
        keep, take = self.average.blend(decay)
        self.average.value.mul_(keep).add_(moment.to(self.average.value) * (take * scale))

"""SKFAC: the inverse of each factor on the side of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

from torch import nn

from rkfac.curvature.block import Block, ColumnsBlock, OnlineBlock, Settings
from rkfac.curvature.decompose import Exact
from rkfac.curvature.factor import Brand
from rkfac.layers import KroneckerAdapter, Use
from rkfac.optim.arguments import check_choice
from rkfac.optim.keywords import Keywords
from rkfac.optim.kfac import KFAC
from rkfac.optim.member import member


@dataclass(frozen=True)
class Columns:
    """Factors are the rows of a batch, averaged slot by slot."""


BLOCKS: Mapping[type, Callable[..., Block]] = {Columns: ColumnsBlock, Brand: OnlineBlock}


def _block(uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> Block:
    """The block of the averaging that was chosen."""
    return BLOCKS[type(settings.method)](uses, adapter, settings)


@member(weight_sharing="reduce")
class SKFAC(KFAC):
    """SKFAC: (C C^T + l I)^-1 = (I - C (l I + C^T C)^-1 C^T) / l for each factor, C (d x n) the scaled rows of a batch.

    Nothing of d x d is formed for n < d; O(d n^2 + n^3) a refresh, 4 n flops a weight and side to apply. Positions are
    reduced within a sample (`weight_sharing`), so that n is the batch. Its own argument; the others are those of `KFAC`:
      averaging         "columns": C <- decay C + (1 - decay) C_k, slot by slot, as published, though what a slot holds has
                        nothing to do with what it held before; "moments": the average of C C^T, kept by Brand's update in
                        `rank` modes where they and the n rows are fewer than d, dense elsewhere
      decomposition     all n modes are used by default (Exact()); RSVD(...) and its kin cut them to their rank
    Mathematics and cost: docs/family/skfac.md; Tang et al., "SKFAC: Training Neural Networks with Faster Kronecker-Factored
    Approximate Curvature" (CVPR 2021).
    """

    preset = Exact()
    block_types: ClassVar[Mapping[type, Callable[..., Block | str]]] = {**KFAC.block_types, KroneckerAdapter: _block}

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        averaging: Literal["columns", "moments"] = "columns",
        **keywords: Unpack[Keywords],
    ) -> None:
        check_choice("averaging", averaging, ("columns", "moments"))
        self._method = Columns() if averaging == "columns" else Brand()
        super().__init__(model, lr, **keywords)

"""SENG: the Fisher matrix of one batch's samples, inverted by their kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

from torch import nn

from rkfac.curvature.block import Block, LayerGradients, NormGradients, Settings, ShrunkBlock, Sketch
from rkfac.layers import KroneckerAdapter, UnitAdapter, Use
from rkfac.optim.keywords import Keywords
from rkfac.optim.kfac import KFAC
from rkfac.optim.member import member
from rkfac.optim.rules import Coupled

NO_FACTORS = "it keeps the gradients of one batch's samples and no factors"
NO_SPECTRUM = "it decomposes the kernel of one batch's samples exactly, and no factor"


def _norm(uses: Sequence[Use], adapter: UnitAdapter, settings: Settings) -> Block:
    kind = NormGradients if settings.method.norms == "curvature" else ShrunkBlock
    return kind(uses, adapter, settings)


def _layer(uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> Block | str:
    if adapter.diagonal_input():
        return "SENG has no curvature for embeddings: a sample's gradient would be as large as the table"
    return LayerGradients(uses, adapter, settings)


@member(inverse_every=200, relative_to="largest")
class SENG(KFAC):
    """SENG (Yang, Xu, Wen, Chen, Xu 2021): S = 1/l [J - U^T (l I + U U^T)^-1 U J] for each layer, F = U^T U.

    The rows of U are the gradients of one batch's samples over sqrt(N), vec(sum over positions of g x^T); there is no
    average and no factor, and the same batch serves `inverse_every` steps. For a layer of D entries, n samples and S positions
    of each a refresh takes 2 n^2 min(D, q^2) flops and the eigenvalues of an n x n kernel; a step takes 2 n min(D, q^2) flops
    and 2 n D where rows are formed, 2 n S D where they are kept as products (2 p D with product="published").
    Embeddings train by the fallback rule. What it costs, when to use it, what is published: docs/family/seng.md.

    Its own arguments (the others: `KFAC`, without those of factors and their decompositions):
      columns           q: a kernel looks at q^2 entries of a row drawn at random where it has more, or, where rows are kept
                        as products, at q rows and q columns of its matrix; None: at all of them
      scaling           of what is drawn: "unbiased", or "published": as if the damping inside of the kernel were l q / D
      explicit_up_to    entries of a gradient up to which rows are formed (where a sample has several positions) and sampled
                        entry by entry
      positions         p: samples of more positions are replaced by their p leading singular directions, in larger layers
                        alone; None: never
      product           U^T b in larger layers: "exact", or "published": a product of two sums over samples, which is exact
                        for one sample alone
      norms             "curvature": rows [sum g x^, sum g] of each sample; "published": the gradient over 1 + l
      damping*          l in units of F's "largest" or "mean" eigenvalue; None: absolute, as published
      rows              most samples of a call whose gradients are kept, drawn and weighted as in `KFAC`
      graft             None: torch's SGD on S as published: decay is added after the preconditioner, before momentum
      kl_clip           its estimate lr^2 <S, J> is that of the natural gradient only where nothing is sampled
    """

    block_types = {KroneckerAdapter: _layer, UnitAdapter: _norm}  # noqa: RUF012
    own_length = own_rest = Coupled()
    lacks = {  # noqa: RUF012
        **dict.fromkeys(("factor_decay", "factor_every", "factor_start", "sides", "max_factor_dim"), NO_FACTORS),
        **dict.fromkeys(
            ("decomposition", "rank", "oversampling", "power_iterations", "tail", "warm_start"), NO_SPECTRUM
        ),
        "stale": "its curvature is that of one batch, which no other batch's resembles",
        "damping_rule": "its damping stands beside the whole Fisher matrix, and is not shared by two factors",
        "apply": "its inverse does not act on the rows of a gradient one by one",
        "power": "sampled and full rows meet in its inverse, which has no other power",
    }

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        columns: int | None = 256,
        scaling: Literal["unbiased", "published"] = "unbiased",
        explicit_up_to: int = 700_000,
        positions: int | None = 16,
        product: Literal["exact", "published"] = "exact",
        norms: Literal["curvature", "published"] = "curvature",
        **keywords: Unpack[Keywords],
    ) -> None:
        self._method = Sketch(columns, scaling, product, positions, explicit_up_to, norms)
        if norms == "published" and keywords.get("relative_to") is not None:
            raise ValueError(
                "norms='published' divides by 1 + damping, which means something for an absolute damping alone: "
                "say relative_to=None, or norms='curvature'"
            )
        keywords["max_factor_dim"] = sys.maxsize
        super().__init__(model, lr, **keywords)

    def _words(self) -> str:
        return f"{self._settings.method!r}, damping relative to {self._settings.damping.relative_to}"

"""BKFAC: wide factors are never formed, Brand's update keeps their leading eigenpairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Unpack

from torch import nn

from rkfac.curvature.block import Block, OnlineBlock
from rkfac.curvature.decompose import RSVD
from rkfac.curvature.factor import Brand
from rkfac.layers import KroneckerAdapter
from rkfac.optim.keywords import Keywords
from rkfac.optim.kfac import KFAC, needs_plain_gradients
from rkfac.optim.member import member


@member(apply=None)
class BKFAC(KFAC):
    """B-KFAC: K-FAC whose wide factors are eigenpairs from the start, updated by the rows of every statistic (Brand).

    U diag(s) U^T <- the r largest eigenpairs of decay * U diag(s) U^T + (1 - decay) * W W^T, W the n scaled rows of a
    batch: O(d (r + n)^2) for a factor of width d, linear in d, where RS-KFAC's refresh takes O(d^2 r). A factor with
    r + n < d is kept so, any other dense and decomposed by `decomposition` (RSVD). What is cut counts in the tail.

    Its own arguments; the others are those of `KFAC`:
      variant           "b": no matrix of d x d is ever formed; "b-r": the average is kept beside it (O(d^2 n) a statistic)
                        and decomposed every `overwrite_every`-th refresh, from the first on; "b-r-c": a share of the modes is
                        also corrected by it every `correct_every` statistics
      overwrite_every, correct_every, correct_share   5, 5 and 0.2 (of the kept modes, and one more) if not given
      apply             None: "backward" where `graft`, `damping_rule` and `adaptive_damping` allow it, "step" otherwise
      rank              of online factors too; "auto" keeps the decomposition's `max_rank` (256) modes and uses those that
                        the damping leaves visible
      max_factor_dim    bounds matrices: factors that are surely online ("b", rows + rank < d) may be wider
    Mathematics and cost: docs/family/bkfac.md; Puiu, "Brand New K-FACs" (arXiv 2210.08494).
    """

    preset = RSVD()
    block_types: ClassVar[Mapping[type, Callable[..., Block | str]]] = {
        **KFAC.block_types,
        KroneckerAdapter: OnlineBlock,
    }

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        variant: Literal["b", "b-r", "b-r-c"] = "b",
        overwrite_every: int | None = None,
        correct_every: int | None = None,
        correct_share: float | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        own: dict[str, Any] = {
            "overwrite_every": overwrite_every,
            "correct_every": correct_every,
            "correct_share": correct_share,
        }
        given = {name: value for name, value in own.items() if value is not None}
        self._method = Brand(variant, **given)
        for name in given:
            needed = "b-r" if name == "overwrite_every" else "b-r-c"
            if not variant.startswith(needed):
                raise ValueError(
                    f"{name} does not go with variant={variant!r}: say variant={needed!r}, or leave it away"
                )
        if keywords.get("apply") is None:
            asked = {k: v for k, v in keywords.items() if k in ("graft", "damping_rule", "adaptive_damping")}
            keywords["apply"] = "step" if needs_plain_gradients(**asked) else "backward"
        super().__init__(model, lr, **keywords)

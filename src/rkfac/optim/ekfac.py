"""EKFAC: K-FAC's bases with second moments in them; SOAP in a Kronecker basis that may be sketched and truncated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Unpack

from torch import nn

from rkfac.curvature.block import Eigen, EigenBlock
from rkfac.curvature.decompose import Exact
from rkfac.layers import KroneckerAdapter
from rkfac.optim.arguments import GROUP_RULES, check_choice, check_flag
from rkfac.optim.keywords import Keywords
from rkfac.optim.kfac import KFAC
from rkfac.optim.member import member


@member(damping_rule="product", damping=0.1)
class EKFAC(KFAC):
    """EK-FAC: S = U_G [U_G^T J U_A / (M + l)] U_A^T, M the second moments of the gradient's coordinates in K-FAC's bases.

    The eigenvectors are the factors', the eigenvalues are measured: the best diagonal there is in that basis (George et al.
    2018). With a sketch (decomposition=rkfac.RSVD(), without which `rank` means nothing) kept modes have moments of their
    own and the rest on either side one mean. Beside K-FAC's cost: "samples" about as much again as the statistics,
    "running" about as much again as the solve at every step; memory of M, in float64, r_G r_A numbers (the weight's size
    with exact bases).

    Its own arguments (all others: `KFAC`):
      moments           "samples": mean of (U_G^T J_n U_A)^2 over samples n, on statistics steps, averaged with factor_decay;
                        `rows` bounds samples times positions, with no fewer than 16 samples a call. "running": average of
                        N (U_G^T J U_A)^2 over steps; with power=-0.5 and graft="adamw" that is SOAP's direction
      moment_decay      of the running average; 0.95 if not given
      carry             a new basis takes the moments over by squared overlaps; False: it starts from the product of
                        eigenvalues (K-FAC), as published

    Damping is added to M: relative to its mean (0.1 of it by default) or its largest kept entry, or absolute. Refused: other
    damping rules, apply="backward" and sides, which all need a factor on each side alone.
    """

    preset = Exact()
    block_types: ClassVar = {**KFAC.block_types, KroneckerAdapter: EigenBlock}

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        moments: Literal["samples", "running"] = "samples",
        moment_decay: float | None = None,
        carry: bool = True,
        **keywords: Unpack[Keywords],
    ) -> None:
        check_choice("moments", moments, ("samples", "running"))
        check_flag("carry", carry)
        if moment_decay is not None:
            GROUP_RULES["factor_decay"]("moment_decay", moment_decay)
            if moments == "samples":
                raise ValueError(
                    "moment_decay is that of moments='running': those of samples are averaged with factor_decay"
                )
        refused = {
            "damping_rule": (("factored", "pi"), "damps each factor, and its moments belong to none: use 'product'"),
            "apply": (("backward",), "acts on each side alone: use 'step'"),
            "sides": (("input", "output"), "leaves no basis on the other side: use 'both'"),
        }
        given = dict(keywords)
        for name, (values, why) in refused.items():
            if given.get(name) in values:
                raise ValueError(f"{name}={given[name]!r} does not go with EKFAC: it {why}")
        if isinstance(given.get("rank"), int) and given.get("decomposition") is None:
            warnings.warn(
                f"rank={given['rank']} means nothing to EKFAC's exact bases: with decomposition=rkfac.RSVD() they are "
                "sketched and keep so many modes",
                stacklevel=3,
            )
        self._method = Eigen(moments, 0.95 if moment_decay is None else float(moment_decay), carry)
        super().__init__(model, lr, **keywords)

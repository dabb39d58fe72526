"""KLD-WRM: K-FAC whose regulariser remembers where the past steps were taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from rkfac.curvature.block import Block, ProximalKroneckerBlock, ProximalTiedBlock, ProximalUnitBlock
from rkfac.curvature.decompose import Exact
from rkfac.layers import KroneckerAdapter, TiedAdapter, UnitAdapter
from rkfac.optim.arguments import check_choice
from rkfac.optim.kfac import KFAC
from rkfac.optim.member import member
from rkfac.optim.past import Past

VARIANTS = ("so", "q")


@dataclass(frozen=True)
class KLDModel:
    """Which model of the loss a step minimises: "so", the linear one, or "q", a quadratic one."""

    variant: str

    def __post_init__(self) -> None:
        if self.variant == "qe":
            raise ValueError(
                "variant='qe', the exact KL divergence to the last networks by inner steps, is not implemented: "
                "variant='q' takes its quadratic model"
            )
        check_choice("variant", self.variant, VARIANTS)

    @property
    def quadratic(self) -> bool:
        """Whether the model has a curvature of its own."""
        return self.variant == "q"


@member(graft=None, momentum=0.0, factor_decay=0.5, update_clip=2.0, kl_clip=0.1)
class KLDWRM(KFAC):
    """KLD-WRM: each step minimises a model of the loss plus 1/lr times the KL divergences to all past networks.

    With weights c_k(i) = (1 - rho) rho^(k-i) and D(theta_i, theta) ~ 1/2 (theta - theta_i)^T F_i (theta - theta_i), each F_i
    being K-FAC's, damped:

        g^_k = g_k + rho (lr_(k-1) / lr_k) (g^_(k-1) - g_(k-1) - F_(k-1) v_(k-1)),   theta <- theta - lr_k v_k
        "so":  v = F^-1 g^,             so that g^_k = g_k - rho (lr_(k-1) / lr_k) g_(k-1)
        "q":   v = (F + lr B)^-1 g^,    B the curvature of the batch alone (F itself on steps without new statistics)

    K-FAC proper leaves out that past regularisers are centred at past iterates (g^ = g). Cost: K-FAC's, one buffer a
    parameter and, for "q", a second decomposition and a product with the factors on steps that refresh.

      lr*               [alpha]; 0.03 if not given, within the published clips
      variant           "so" or "q"
      factor_decay*     also [rho] of the memory of steps

    A step has the length that the model asks for: graft must be None, power -1; apply="backward" and adaptive_damping do not
    go with it. Momentum, where asked for, comes on top and is not counted. Puiu: "Rethinking Exponential Averaging of the
    Fisher" (2022). The other arguments: `KFAC`; its published settings: `kld_wrm_defaults`.
    """

    preset = Exact()
    own_length = Past()
    block_types: ClassVar[Mapping[type, Callable[..., Block | str]]] = {
        **KFAC.block_types,
        KroneckerAdapter: ProximalKroneckerBlock,
        TiedAdapter: ProximalTiedBlock,
        UnitAdapter: ProximalUnitBlock,
    }

    def __init__(
        self, model: nn.Module, lr: float | None = None, *, variant: Literal["so", "q", "qe"] = "so", **keywords: Any
    ) -> None:
        self._method = KLDModel(variant)
        _refuse(keywords)
        super().__init__(model, 0.03 if lr is None else lr, **keywords)


def _refuse(keywords: dict[str, Any]) -> None:
    """What has no meaning for a step that minimises a model of its own."""
    why = {
        "graft": (keywords["graft"] is not None, "its steps have the length that its model asks for: use graft=None"),
        "apply": (keywords.get("apply") == "backward", "it adds its memory to plain gradients: use apply='step'"),
        "power": (keywords.get("power", -1) != -1, "its model is that of the natural gradient: use power=-1"),
        "adaptive_damping": (
            keywords.get("adaptive_damping") is not None,
            "the change of the loss would be compared with a model that leaves out the past: use a fixed damping",
        ),
    }
    for name, (asked, reason) in why.items():
        if asked:
            raise ValueError(f"{name}={keywords[name]!r} does not go with KLDWRM: {reason}")

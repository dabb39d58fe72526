"""KLD-WRM: K-FAC whose regulariser remembers where the past steps were taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

from torch import nn

from rkfac import compat
from rkfac.curvature.block import Block, ProximalKroneckerBlock, ProximalTiedBlock, ProximalUnitBlock
from rkfac.curvature.decompose import Exact
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.replay import Recorder
from rkfac.layers import KroneckerAdapter, TiedAdapter, UnitAdapter
from rkfac.optim.arguments import check_choice
from rkfac.optim.directing import Step
from rkfac.optim.keywords import Keywords
from rkfac.optim.kfac import KFAC, meaning_of
from rkfac.optim.member import member
from rkfac.optim.moves import Move
from rkfac.optim.owner import model_of
from rkfac.optim.past import Past
from rkfac.optim.wake import InnerSteps, Wake

VARIANTS = ("so", "q", "qe")


@dataclass(frozen=True)
class KLDModel:
    """Which model of the loss a step minimises: "so", the linear one, or "q" and "qe", a quadratic one."""

    variant: str

    @property
    def quadratic(self) -> bool:
        """Whether the model has a curvature of its own."""
        return self.variant != "so"

    @property
    def asks_for_the_batch(self) -> bool:
        """Whether that curvature is asked for alone, too."""
        return False


@dataclass(frozen=True)
class ExactModel(KLDModel):
    """The quadratic model with exact divergences between what outputs mean."""

    inner: InnerSteps
    likelihood: Likelihood

    @property
    def asks_for_the_batch(self) -> bool:
        """By every inner step."""
        return self.inner.steps > 0


@member(graft=None, momentum=0.0, factor_decay=0.5, update_clip=2.0, kl_clip=0.1)
class KLDWRM(KFAC):
    """KLD-WRM: each step minimises a model of the loss plus 1/lr times the KL divergences to all past networks.

    With weights c_k(i) = (1 - rho) rho^(k-i) and D(theta_i, theta) ~ 1/2 (theta - theta_i)^T F_i (theta - theta_i), each F_i
    being K-FAC's, damped:

        g^_k = g_k + rho (lr_(k-1) / lr_k) (g^_(k-1) - g_(k-1) - F_(k-1) v_(k-1)),   theta <- theta - lr_k v_k
        "so":  v = F^-1 g^,             so that g^_k = g_k - rho (lr_(k-1) / lr_k) g_(k-1)
        "q":   v = (F + lr B)^-1 g^,    B the curvature of the batch alone (F itself on steps without new statistics)
        "qe":  "q", and from there inner steps of SGD with the exact divergences D to the last networks on the batch

    K-FAC proper leaves out that past regularisers are centred at past iterates (g^ = g). Cost: K-FAC's, one buffer a
    parameter and, for "q", a second decomposition and a product with the factors on steps that refresh.

      lr*               [alpha]; 0.03 if not given, within the published clips
      variant           "so", "q" or "qe"
      inner             rkfac.InnerSteps(...) for "qe": how many, how long, how many networks; None: as published
      likelihood        also what the outputs mean between which "qe" measures D
      factor_decay*     also [rho] of the memory of steps

    A step has the length that the model asks for: graft must be None, power -1; apply="backward" and adaptive_damping do not
    go with it. "qe" calls the model again in every step (docs/family/kld-wrm.md). Momentum, where asked for, comes on top and
    is not counted. Puiu: "Rethinking Exponential Averaging of the Fisher" (2022). The other arguments: `KFAC`; its published
    settings: `kld_wrm_defaults`.
    """

    preset = Exact()
    own_length = Past()
    block_types: ClassVar[Mapping[type, Callable[..., Block | str]]] = {
        **KFAC.block_types,
        KroneckerAdapter: ProximalKroneckerBlock,
        TiedAdapter: ProximalTiedBlock,
        UnitAdapter: ProximalUnitBlock,
    }

    _wake: Wake | None = None

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        variant: Literal["so", "q", "qe"] = "so",
        inner: InnerSteps | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        self._method = method = _method(variant, inner, keywords)
        _refuse(dict(keywords))
        model, keywords["params"] = model_of(model, keywords.get("params"), type(self).__name__)
        super().__init__(model, 0.03 if lr is None else lr, **keywords)
        if isinstance(method, ExactModel) and method.asks_for_the_batch:
            self._look_back(model, method)

    def _look_back(self, model: nn.Module, method: ExactModel) -> None:
        """Keep networks, and see the model's calls."""
        assert self._capture is not None
        recorder = Recorder(self._model)
        # Around a graph rather than inside of it.
        recorder.watch(self._model if compat.compiled_inside(model) is None else model, self._capture)
        settings = self._settings
        self._wake = Wake(
            self._model, method.inner, method.likelihood, settings.loss_average, recorder, settings.randomness
        )

    def _take(self, moves: Sequence[Move], step: Step) -> None:
        """Also the inner steps."""
        if self._wake is None:
            super()._take(moves, step)
            return
        with self._pause():
            self._wake.take(moves, step.state, step.rules, self._gate)

    def state_dict(self) -> dict[str, Any]:
        """Also the last networks."""
        state = super().state_dict()
        if self._wake is not None:
            state["curvature"]["networks"] = self._wake.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Also the last networks."""
        curvature = state_dict.get("curvature") if isinstance(state_dict, Mapping) else None
        ours = isinstance(curvature, Mapping) and curvature.get("fingerprint") == self._fingerprint
        networks = self._wake.checked(curvature.get("networks")) if self._wake and curvature and ours else []
        super().load_state_dict(state_dict)  # which refuses what is not ours
        if self._wake is not None:
            self._wake.go_on_from(networks)


def _method(variant: str, inner: Any, keywords: Mapping[str, Any]) -> KLDModel:
    check_choice("variant", variant, VARIANTS)
    if variant != "qe":
        if inner is not None:
            raise ValueError(f"inner={inner!r} is for variant='qe': {variant!r} makes no inner steps")
        return KLDModel(variant)
    if inner is not None and not isinstance(inner, InnerSteps):
        raise ValueError(f"inner must be rkfac.InnerSteps(...), got {inner!r}")
    likelihood = meaning_of(keywords.get("likelihood", "categorical"))
    if type(likelihood).divergence is Likelihood.divergence:
        raise ValueError(
            f"likelihood={likelihood!r} does not say how far two outputs are from each other: give it divergence"
        )
    return ExactModel(variant, InnerSteps() if inner is None else inner, likelihood)


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

"""KFAC, RSKFAC, SREKFAC: choices of arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from rkfac.curvature.block import Settings
from rkfac.curvature.damping import RULES
from rkfac.curvature.decompose import RSVD, SREVD, Decomposition, Exact
from rkfac.curvature.factor import Dropped, Start
from rkfac.curvature.fisher import NAMED, Likelihood
from rkfac.optim.adaptive import LevenbergMarquardt
from rkfac.optim.arguments import (
    check_choice,
    check_flag,
    check_patterns,
    check_power,
    check_processes,
    check_scaler,
    check_stale,
    randomness_from,
)
from rkfac.optim.base import CurvatureOptimizer
from rkfac.optim.coverage import Choice
from rkfac.optim.rules import GRAFTS

STARTS = {
    "identity": Start(identity=True),
    "unbiased": Start(identity=False),
    "paper": Start(identity=True, sketched=True),
    "dropped": Dropped(),
}


def needs_plain_gradients(graft: Any = "sgd", damping_rule: Any = "factored", adaptive_damping: Any = None) -> str:
    """What of these keeps gradients from being preconditioned in the backward pass, or an empty string."""
    why = {
        "graft='adamw', whose moments are those of plain gradients": graft == "adamw",
        "damping_rule='product', which does not act on each side alone": damping_rule == "product",
        "adaptive_damping, which compares with plain gradients": adaptive_damping is not None,
    }
    return next((what for what, asked in why.items() if asked), "")


def meaning_of(likelihood: Any) -> Likelihood:
    """A likelihood, by its name or itself."""
    if isinstance(likelihood, str):
        check_choice("likelihood", likelihood, tuple(NAMED))
        return NAMED[likelihood]
    if not isinstance(likelihood, Likelihood):
        raise ValueError(f"likelihood must be a name or an rkfac likelihood, got {likelihood!r}")
    return likelihood


class KFAC(CurvatureOptimizer):
    """K-FAC: S = (Gamma + l I)^-1 J (A + l I)^-1 for each layer, by the exact eigendecomposition or any other.

    Arguments (the paper's symbol in brackets; those marked * sit in `param_groups`, where schedulers can change them):
      model             the nn.Module to train, plain or compiled; or its parameters, as torch's optimizers take them: the
                        model is found by them
      lr*               learning rate [alpha]; 0.1, or 1e-3 under graft="adamw", if not given
      params            torch-style parameter groups; all parameters of the model by default. Without a model: they find it
      graft             length of each layer's step: "sgd" (what torch's SGD with these numbers would have: momentum before
                        the preconditioner, decay as in SGD), "adamw" (AdamW's, with its moments kept and its decay), None
                        (the preconditioner's own, as in the paper: momentum of the directions, decay apart from both)
      apply             "step": `.grad` is preconditioned in step(); "backward": Linear layers with fewer rows in a batch than
                        they are wide get natural gradients in the backward pass, so that their `.grad` (in units of the
                        preconditioner's largest multiplier) holds these; not with "adamw" or "product"
      momentum*, nesterov*   as in torch's SGD; 0.9 and False if not given
      betas*, eps*      as in torch's AdamW, for graft or fallback "adamw"; (0.9, 0.999) and 1e-8 if not given
      weight_decay*     never preconditioned; as in torch's SGD (0 if not given) or AdamW (0.01); from step
                        `weight_decay_from`* on
      damping*          [lambda] in units of `relative_to`: a factor's "mean" or "largest" (paper) eigenvalue; None: absolute
      power             the damped curvature is taken to this power, in [-1, 0): -1 is K-FAC's natural gradient, -0.5 the
                        half-way that Shampoo, SOAP and Adam go; kl_clip and adaptive_damping need -1
      damping_rule      "factored": l on each factor; "product": on the product spectrum; "pi": split by the trace ratio
      sides             which of a layer's two factors are kept: "both", "input" (FOOF: no statistics of gradients are
                        collected) or "output"; the identity, undamped, stands for the other. Norm layers have one block
      factor_decay*, factor_every*, inverse_every*   [rho, T_KU, T_KI]
      factor_start      "unbiased": averages are free of their start; "identity": they start from I, which damps the
                        first steps and is kept apart from what is decomposed; "paper": the same, but sketches see it;
                        "dropped": the same without the identity, so that young averages are too small and first steps long
      eager_start       statistics at each of the first 50 steps, and inverses each time half of the steps so far have passed
      stagger           layers take turns within inverse_every, so that no step waits for all inverses; those of the first
                        steps come together all the same
      stale             a layer's statistics and inverse are renewed together, at intervals of its own instead of fixed
                        periods: 1, 1, 2, 3, 5, 8... steps while its factors change by less than this share (0.1 in
                        SP-NGD), half as long where they change by more; factor_decay is then what is left after
                        factor_every steps, however they are divided. inverse_every and eager_start mean nothing then
      rank*, oversampling*, power_iterations*        [r, r_l, n_pwr-it] of sketched decompositions; rank may be "auto":
                        what the damping leaves visible, at most 256 (RSVD(max_rank=...)); then a warm start stands for the
                        power iterations of its columns, and fresh ones alone take them (not in SREVD)
      tail              what replaces the discarded spectrum: "zero" (paper) or "trace" (a constant preserving it)
      warm_start        start each sketch from the previous basis
      update_clip*      largest RMS of a layer's update; kl_clip* bound on sum lr^2 <S, J> over all layers; None: off
      fisher            "empirical" (labels of the loss, free) or "mc" (drawn from the model; one more backward through the
                        activations on statistics steps); `likelihood` then says what the outputs mean: "categorical",
                        "gaussian", "bernoulli" or e.g. rkfac.Categorical(class_dim=1)
      weight_sharing    for layers applied at several positions: "expand" (every position is a sample of its own) or
                        "reduce" (positions of a sample, the first dimension, are averaged: one loss a sample)
      rows              most rows that a call of a layer adds to a factor, drawn at random without replacement and weighted
                        so that the average is unbiased; None: all (paper). Convolutions unfold no more than these
      loss_average      what the loss averages over: "batch", "tokens" (every position, also of convolutions) or "sum"
                        (nothing). Calls of a layer on the same tokens count once. Convolutions and batch norms know their
                        batch; for Linear layers, embeddings and layer norms every row is a sample ("expand"), whatever the
                        order of dimensions
      fallback          rule for parameters no block covers: "sgd" or "adamw", at lr * fallback_scale*; that of the graft
      include, exclude  patterns of module names or classes to precondition, e.g. exclude=("*Norm*", "head")
      max_factor_dim    layers whose factor would be wider are left to the fallback rule
      decomposition     rkfac.Exact(), RSVD(...), SREVD(...), Nystrom(...), Auto(...)
      adaptive_damping  rkfac.LevenbergMarquardt(...), needs step(closure)
      grad_scaler       the GradScaler, needed only by whoever calls scaler.unscale_(optimizer) and then optimizer.step()
                        instead of scaler.step(optimizer)
      process_group     of the processes that train this model together: their statistics are added up and their refreshes
                        shared out, so that W of them take the steps of one with the whole batch, their losses being
                        averaged. None: the group of the model's DistributedDataParallel, or all processes there are;
                        False: this process trains by itself, whoever else is there
      memory            "replicated": every process keeps all averages; "owned": those of wide layers are in one process
                        alone, which decomposes them; all processes must then ask for the state_dict together
      max_failures      failed decompositions, or updates that are not finite, in a row before an error is raised
      generator, seed   randomness of sketches and sampled labels: from a seed every draw gets one of its own, so that
                        layers do not depend on each other; a generator is used by all draws in their order
    """

    preset: ClassVar[Decomposition] = Exact()  # what `decomposition=None` means
    _method: Any = None  # what the blocks of a member of the family are told, set before this constructor is called

    def __init__(
        self,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        graft: Literal["sgd", "adamw"] | None = "sgd",
        apply: Literal["step", "backward"] = "step",
        momentum: float | None = None,
        nesterov: bool = False,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        weight_decay_from: int = 0,
        damping: float = 1.0,
        power: float = -1.0,
        damping_rule: Literal["factored", "product", "pi"] = "factored",
        sides: Literal["both", "input", "output"] = "both",
        relative_to: Literal["mean", "largest"] | None = "mean",
        factor_decay: float = 0.95,
        factor_every: int = 10,
        inverse_every: int = 50,
        factor_start: Literal["unbiased", "identity", "paper", "dropped"] = "unbiased",
        eager_start: bool = True,
        stagger: bool = False,
        stale: float | None = None,
        rank: int | Literal["auto"] = "auto",
        oversampling: int = 10,
        power_iterations: int = 1,
        tail: Literal["zero", "trace"] = "trace",
        warm_start: bool = True,
        update_clip: float | None = None,
        kl_clip: float | None = None,
        fisher: Literal["empirical", "mc"] = "empirical",
        likelihood: Literal["categorical", "gaussian", "bernoulli"] | Likelihood = "categorical",
        weight_sharing: Literal["expand", "reduce"] = "expand",
        rows: int | None = 1024,
        loss_average: Literal["batch", "tokens", "sum"] = "batch",
        fallback: Literal["sgd", "adamw"] | None = None,
        fallback_scale: float = 1.0,
        include: Iterable[str] | str = (),
        exclude: Iterable[str] | str = (),
        max_factor_dim: int = 16384,
        decomposition: Decomposition | None = None,
        adaptive_damping: LevenbergMarquardt | None = None,
        grad_scaler: Any = None,
        process_group: Any = None,
        memory: Literal["replicated", "owned"] = "replicated",
        max_failures: int = 3,
        maximize: bool = False,
        generator: torch.Generator | None = None,
        seed: int = 0,
    ) -> None:
        check_choice("damping_rule", damping_rule, tuple(RULES))
        check_choice("sides", sides, ("both", "input", "output"))
        check_choice("factor_start", factor_start, tuple(STARTS))
        check_choice("tail", tail, ("zero", "trace"))
        check_choice("fisher", fisher, ("empirical", "mc"))
        check_choice("weight_sharing", weight_sharing, ("expand", "reduce"))
        check_choice("loss_average", loss_average, ("batch", "tokens", "sum"))
        check_choice("graft", graft, tuple(GRAFTS))
        check_choice("apply", apply, ("step", "backward"))
        if apply == "backward" and (what := needs_plain_gradients(graft, damping_rule, adaptive_damping)):
            raise ValueError(f"apply='backward' does not go with {what}: leave one of them away")
        check_choice("memory", memory, ("replicated", "owned"))
        check_choice("fallback", fallback, ("sgd", "adamw", None))
        check_choice("relative_to", relative_to, ("mean", "largest", None))
        check_power(power, kl_clip, adaptive_damping is not None)
        check_flag("warm_start", warm_start)
        check_flag("eager_start", eager_start)
        check_flag("stagger", stagger)
        check_scaler("grad_scaler", grad_scaler)
        check_processes("process_group", process_group)
        check_stale(stale, stagger, type(self).__name__, self.block_types.values())
        meaning = meaning_of(likelihood)
        if decomposition is not None and not isinstance(decomposition, Decomposition):
            raise ValueError(f"decomposition must be a strategy such as rkfac.RSVD(), got {decomposition!r}")
        if adaptive_damping is not None and not isinstance(adaptive_damping, LevenbergMarquardt):
            raise ValueError(f"adaptive_damping must be rkfac.LevenbergMarquardt(...), got {adaptive_damping!r}")
        whole = {"max_factor_dim": max_factor_dim, "max_failures": max_failures, "rows": 1 if rows is None else rows}
        for name, value in whole.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        settings = Settings(
            decomposition=type(self).preset if decomposition is None else decomposition,
            damping=RULES[damping_rule](relative_to, float(power)),
            tail=tail,
            warm_start=warm_start,
            weight_sharing=weight_sharing,
            rows=rows,
            loss_average=loss_average,
            sampled=fisher == "mc",
            start=STARTS[factor_start],
            eager_start=eager_start,
            backward=apply == "backward",
            stagger=stagger,
            max_failures=max_failures,
            randomness=randomness_from(generator, seed),
            sides=sides,
            stale=stale,
            method=self._method,
        )
        rest = fallback or graft or "sgd"
        if graft == "adamw" and rest == "adamw" and (momentum is not None or nesterov):
            raise ValueError("momentum and nesterov are SGD's: under graft='adamw' say betas=(momentum, 0.999)")
        if "adamw" not in (graft, rest) and (betas is not None or eps is not None):
            raise ValueError("betas and eps are AdamW's: say graft='adamw', or leave them away")
        numbers: dict[str, Any] = {}  # of the rules that are in use, for torch's schedulers look at their names
        if graft != "adamw" or rest == "sgd":
            numbers |= {"momentum": 0.9 if momentum is None else momentum, "nesterov": nesterov}
        if graft == "adamw" or rest == "adamw":
            numbers |= {"betas": (0.9, 0.999) if betas is None else betas, "eps": 1e-8 if eps is None else eps}
        defaults = {
            "lr": (1e-3 if graft == "adamw" else 0.1) if lr is None else lr,
            **numbers,
            "weight_decay": (0.01 if graft == "adamw" else 0.0) if weight_decay is None else weight_decay,
            "weight_decay_from": weight_decay_from,
            "damping": damping,
            "factor_decay": factor_decay,
            "factor_every": factor_every,
            "inverse_every": inverse_every,
            "rank": rank,
            "oversampling": oversampling,
            "power_iterations": power_iterations,
            "update_clip": update_clip,
            "kl_clip": kl_clip,
            "fallback_scale": fallback_scale,
            "maximize": maximize,
        }
        super().__init__(
            model,
            params,
            {name: value for name, value in defaults.items() if name not in self.lacks},
            settings,
            choice=Choice(check_patterns("include", include), check_patterns("exclude", exclude), max_factor_dim),
            graft=graft,
            fallback=rest,
            likelihood=meaning if fisher == "mc" else None,
            adaptive_damping=adaptive_damping,
            grad_scaler=grad_scaler,
            process_group=process_group,
            memory=memory,
        )


class RSKFAC(KFAC):
    """RS-KFAC (paper's Algorithm 4): K-FAC with the randomized SVD, quadratic in the layers' width. Arguments: `KFAC`."""

    preset = RSVD()


class SREKFAC(KFAC):
    """SRE-KFAC (paper's Algorithm 5): K-FAC with the symmetric randomized EVD, cheaper and a little less accurate."""

    preset = SREVD()

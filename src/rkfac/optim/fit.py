"""fit_curvature: the curvature of a model without training it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import nn

from rkfac import compat
from rkfac.curvature.block import Eigen, Settings
from rkfac.curvature.damping import RULES
from rkfac.curvature.decompose import Decomposition, Exact
from rkfac.curvature.factor import Start
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.randomness import Seeded
from rkfac.distributed import refuse_sharded
from rkfac.operators import Curvature
from rkfac.optim.arguments import check_choice, check_patterns
from rkfac.optim.compiled import unwrapped
from rkfac.optim.coverage import Choice
from rkfac.optim.fitting import Enumerated, Loss, fitted
from rkfac.optim.kfac import meaning_of
from rkfac.optim.terms import Terms, samples_of


def fit_curvature(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    *,
    fisher: Literal["empirical", "mc", "exact"] = "empirical",
    likelihood: Literal["categorical", "gaussian", "bernoulli"] | Likelihood = "categorical",
    draws: int = 1,
    damping: float = 1.0,
    damping_rule: Literal["factored", "product", "pi"] | None = None,
    eigenvalues: Literal["products", "moments"] = "products",
    relative_to: Literal["mean", "largest"] | None = "mean",
    decomposition: Decomposition | None = None,
    rank: int | Literal["auto"] = "auto",
    tail: Literal["zero", "trace"] = "trace",
    sides: Literal["both", "input", "output"] = "both",
    weight_sharing: Literal["expand", "reduce"] = "expand",
    loss_average: Literal["batch", "tokens", "sum"] = "batch",
    terms: Terms | None = None,
    rows: int | None = None,
    include: Iterable[str] | str = (),
    exclude: Iterable[str] | str = (),
    max_factor_dim: int = 16384,
    seed: int = 0,
) -> Curvature:
    """The curvature of a model as it stands: K-FAC's factors, averaged over all samples of all batches; nothing is trained.

    The model runs in evaluation mode and is left as it was: parameters, modes, buffers, gradients, hooks, random numbers.
    Among several processes each gets the curvature of its own batches: nothing is added up over them.

    Arguments (those not listed mean what they mean in `KFAC`):
      batches        pairs (inputs, targets); inputs that are a tuple or a mapping are the model's several arguments
      loss           of the model's output and the targets: a number, the mean over the batch's samples (`loss_average`)
      loss_average   "batch": the mean over samples, of which a batch has as many as its targets (or inputs) are long, "sum": the
                     sum over these; "tokens": the mean over all positions
      terms          of the inputs and targets of a batch: how many terms its loss is the mean of, where these are others, e.g.
                     lambda inputs, targets: (targets != -100).sum(); under "empirical" alone, for targets that are drawn are
                     as many as the model's outputs
      fisher         "empirical": gradients of the loss itself; "mc": of targets drawn from the model, `draws` times a batch;
                     "exact": the expectation over those, by as many passes a batch as a sample has outputs
      likelihood     what the model's outputs mean under "mc" and "exact"
      damping        may be changed later without fitting again, and so may its rule: `curvature.damped(...)`
      damping_rule   "factored" if not given
      eigenvalues    "products": those of K-FAC; "moments": EK-FAC's, second moments of the samples' gradients in the same bases,
                     closer to the Fisher matrix; batches are then gone through twice, and the rule is "product"
      decomposition  rkfac.Exact() by default; with a sketch say rank= too, for an automatic rank is made for one damping
      rows           most rows of a call that enter a factor, drawn at random; all of them by default
    """
    _check_model(model)
    check_choice("fisher", fisher, ("empirical", "mc", "exact"))
    check_choice("eigenvalues", eigenvalues, ("products", "moments"))
    moments = eigenvalues == "moments"
    rule = damping_rule or ("product" if moments else "factored")
    check_choice("damping_rule", rule, ("product",) if moments else tuple(RULES))
    check_choice("relative_to", relative_to, ("mean", "largest", None))
    check_choice("tail", tail, ("zero", "trace"))
    check_choice("sides", sides, ("both",) if moments else ("both", "input", "output"))
    check_choice("weight_sharing", weight_sharing, ("expand", "reduce"))
    check_choice("loss_average", loss_average, ("batch", "tokens", "sum"))
    _check_numbers(draws, fisher, rows, rank, max_factor_dim, damping)
    _check_strategy(decomposition)
    settings = Settings(
        decomposition=Exact() if decomposition is None else decomposition,
        damping=RULES[rule](relative_to),
        tail=tail,
        warm_start=False,
        weight_sharing=weight_sharing,
        rows=rows,
        loss_average=loss_average,
        sampled=fisher != "empirical",
        start=Start(identity=False),
        eager_start=False,
        backward=False,
        stagger=False,
        max_failures=1,
        randomness=Seeded(seed),
        sides=sides,
        method=Eigen("samples", 0.0, carry=True) if moments else None,
    )
    meaning = _meaning(fisher, likelihood)
    group = {"damping": damping, "rank": rank, "oversampling": 10, "power_iterations": 2}
    inner = unwrapped(model)
    choice = Choice(check_patterns("include", include), check_patterns("exclude", exclude), max_factor_dim)
    choice.check(inner)
    return fitted(inner, batches, loss, choice, settings, group, meaning, draws, _terms(terms, fisher, loss_average))


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("curvature is made of gradients: call fit_curvature outside of torch.inference_mode()")
    refuse_sharded(model)
    if any(map(compat.is_sharded, model.parameters())):
        raise ValueError(
            "fit_curvature needs whole parameters, and these are sharded: give it the model before fully_shard"
        )


def _meaning(fisher: str, likelihood: Any) -> Likelihood | None:
    """What targets come from, drawn or enumerated; None: they are the loss's own."""
    if fisher == "empirical":
        return None
    return Enumerated(meaning_of(likelihood)) if fisher == "exact" else meaning_of(likelihood)


def _terms(terms: Any, fisher: str, loss_average: str) -> Terms | None:
    """What knows how many terms a loss is the mean of; None: the draws, or the layers, do."""
    if terms is None:
        return samples_of if fisher == "empirical" and loss_average != "tokens" else None
    if fisher != "empirical":
        raise ValueError(f"terms= goes with fisher='empirical' alone: fisher={fisher!r} asks nothing of the loss")
    if not callable(terms):
        raise ValueError(f"terms must be a function of a batch's inputs and targets, got {terms!r}")
    return cast("Terms", terms)


def _check_strategy(decomposition: Any) -> None:
    if decomposition is not None and not isinstance(decomposition, Decomposition):
        raise ValueError(f"decomposition must be a strategy such as rkfac.RSVD(), got {decomposition!r}")


def _check_numbers(draws: Any, fisher: str, rows: Any, rank: Any, widest: Any, damping: Any) -> None:
    whole = {"draws": draws, "rows": 1 if rows is None else rows, "rank": 1 if rank == "auto" else rank}
    for name, value in {**whole, "max_factor_dim": widest}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if draws > 1 and fisher != "mc":
        raise ValueError(f"draws={draws} goes with fisher='mc' alone: nothing is drawn under fisher={fisher!r}")
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 <= damping < math.inf:
        raise ValueError(f"damping must be a finite number >= 0, got {damping!r}")

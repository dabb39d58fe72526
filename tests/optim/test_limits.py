"""Limits and formulas: each optimizer against the arithmetic it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import (
    Batch,
    assert_same_averages,
    assert_same_parameters,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    step,
    train,
    twin,
)

# The paper's own step: what the preconditioner gives, at its own length.
FRESH: dict[str, Any] = {
    "factor_every": 1,
    "inverse_every": 1,
    "graft": None,
    "momentum": 0.0,
    "relative_to": "largest",
}


def dense_direction(optimizer: rkfac.KFAC, model: nn.Sequential, layer: str, damping: float) -> Tensor:
    """(G + l_G I)^-1 [J | j] (A + l_A I)^-1 with explicit inverses, l relative to the largest eigenvalue."""
    linear = model.get_submodule(layer)
    J = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], 1)
    factors = averages(optimizer)
    A, G = factors[f"{layer}.input"], factors[f"{layer}.output"]
    inverses = [
        torch.linalg.inv(X + damping * torch.linalg.eigvalsh(X)[-1] * torch.eye(len(X), dtype=X.dtype)) for X in (G, A)
    ]
    return inverses[0] @ J @ inverses[1]


def joined(values: dict[str, Tensor], layer: str) -> Tensor:
    return torch.cat([values[f"{layer}.weight"], values[f"{layer}.bias"][:, None]], 1)


@pytest.mark.parametrize("sketched", [stated.RSKFAC, stated.SREKFAC])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("make, draw", [(mlp, rows), (convnet, images), (reader, sentences)])
def test_full_rank_equals_kfac_under_the_same_rule(sketched: Any, rule: str, make: Any, draw: Any) -> None:
    model = make()
    other, batches = twin(model), [draw() for _ in range(5)]
    settings: dict[str, Any] = {"damping_rule": rule, "factor_every": 1, "inverse_every": 2, "tail": "zero"}
    exact, sketch = stated.KFAC(model, **settings), sketched(other, rank=100, oversampling=0, **settings)
    train(model, exact, batches)
    train(other, sketch, batches)
    assert_same_parameters(other, model, rtol=1e-6, atol=1e-8)
    assert_same_averages(sketch, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("optimizer", [stated.KFAC, stated.RSKFAC, stated.SREKFAC])
@pytest.mark.parametrize("rule, power, rounding", [("factored", 2, 1e-7), ("product", 1, 1e-7), ("pi", 1, 1e-3)])
@pytest.mark.parametrize("make, draw", [(convnet, images), (reader, sentences)])
def test_great_damping_gives_the_gradient_direction(
    optimizer: Any, rule: str, power: int, rounding: float, make: Any, draw: Any
) -> None:
    """lambda^power S -> J, an error of order 1/lambda, or 1/sqrt(lambda) where lambda is split between the factors.

    A learning rate of lambda^power makes the step the gradient itself. Unit-wise blocks have one lambda whatever the
    rule, so they are left out.
    """
    model, damping = make(), 1e9
    settings = {"damping": damping, "damping_rule": rule, "relative_to": None, "rank": 3, "exclude": "*Norm*"}
    made = optimizer(model, lr=damping**power, fallback_scale=0.0, **{**FRESH, **settings})
    covered = {r.name for r in made.report() if r.covered}
    start = parameters(model)
    step(model, made, draw())
    compared = 0
    for name, p in model.named_parameters():
        if name.rpartition(".")[0] in covered:
            layer = model.get_submodule(name.rpartition(".")[0])  # a bias before BatchNorm has no gradient to speak of
            bound = rounding * max(float(q.grad.abs().max()) for q in layer.parameters())
            torch.testing.assert_close(start[name] - p.detach(), p.grad, rtol=0, atol=bound)
            compared += 1
    assert compared >= 5


def test_one_step_equals_explicit_inverses() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.3, damping=0.05, **FRESH)
    start = parameters(model)
    step(model, optimizer, rows())
    for layer in ("0", "2", "4"):
        moved = joined(start, layer) - joined(parameters(model), layer)
        torch.testing.assert_close(moved, 0.3 * dense_direction(optimizer, model, layer, 0.05))


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_the_rms_clip_bounds_every_layer(clip: float) -> None:
    model = convnet()
    optimizer = stated.KFAC(model, lr=0.5, **{**FRESH, "update_clip": clip})
    start, batch = parameters(model), images()
    free = twin(model)
    step(free, stated.KFAC(free, lr=0.5, **FRESH), batch)
    step(model, optimizer, batch)
    for report in optimizer.report():
        names = [f"{report.name}.weight", f"{report.name}.bias"]
        S = torch.cat([(start[n] - parameters(model)[n]).flatten() / 0.5 for n in names])
        unclipped = torch.cat([(start[n] - parameters(free)[n]).flatten() / 0.5 for n in names])
        rms = unclipped.square().mean().sqrt()
        factor = min(1.0, clip / float(rms))
        assert S.square().mean().sqrt() <= clip * (1 + 1e-9)
        torch.testing.assert_close(S, factor * unclipped, rtol=1e-8, atol=1e-10)
        assert report.clip == pytest.approx(factor)


@pytest.mark.parametrize("bound", [1e-3, 1e6])
@pytest.mark.parametrize("update_clip", [None, 0.05])
def test_the_kl_clip_bounds_the_quadratic_form_over_all_layers(bound: float, update_clip: float | None) -> None:
    """nu = min(1, sqrt(c / sum lr^2 k^2 <S, J>)), k being a layer's own clip: the quadratic form of the step k S."""
    model, lr = mlp(), 0.5
    free, whole, batch = twin(model), twin(model), rows()
    start = parameters(model)
    step(whole, stated.KFAC(whole, lr=lr, **{**FRESH, "update_clip": None}), batch)
    step(free, stated.KFAC(free, lr=lr, **{**FRESH, "update_clip": update_clip}), batch)
    optimizer = stated.KFAC(model, lr=lr, **{**FRESH, "kl_clip": bound, "update_clip": update_clip})
    step(model, optimizer, batch)
    S = {name: (start[name] - value) / lr for name, value in parameters(free).items()}
    own = {
        name: float(torch.linalg.norm(S[name]) / torch.linalg.norm((start[name] - value) / lr))
        for name, value in parameters(whole).items()
    }
    total = sum(lr**2 * own[name] * float((S[name] * p.grad).sum()) for name, p in free.named_parameters())
    nu = min(1.0, (bound / total) ** 0.5)
    assert (nu < 1) == (bound < 1)
    assert nu**2 * total <= bound * (1 + 1e-9)
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, start[name] - lr * nu * S[name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay_from", [0, 2])
def test_momentum_and_decoupled_decay_against_the_formula(decay_from: int, nesterov: bool) -> None:
    """m <- mu m + S;  theta <- (1 - lr w) theta - lr m (or S + mu m), the decay from its step on, in no buffer."""
    model, lr, mu, w = mlp(), 0.2, 0.8, 0.1
    optimizer = stated.KFAC(
        model,
        lr=lr,
        damping=0.1,
        nesterov=nesterov,
        **{**FRESH, "momentum": mu},
        weight_decay=w,
        weight_decay_from=decay_from,
    )
    layers = ("0", "2", "4")
    theta = {layer: joined(parameters(model), layer) for layer in layers}
    buffers = {layer: torch.zeros_like(value) for layer, value in theta.items()}
    for k in range(4):
        step(model, optimizer, rows())
        for layer in layers:
            S = dense_direction(optimizer, model, layer, 0.1)
            buffers[layer] = mu * buffers[layer] + S
            ahead = S + mu * buffers[layer] if nesterov else buffers[layer]
            theta[layer] = (1 - lr * w * (k >= decay_from)) * theta[layer] - lr * ahead
            torch.testing.assert_close(joined(parameters(model), layer), theta[layer], rtol=1e-7, atol=1e-9)


def test_bases_and_statistics_keep_their_periods() -> None:
    """Statistics at 0, 2, 4, ...; bases at 0, 3, 6, ... from the averages of that moment."""
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, factor_every=2, inverse_every=3)
    seen: list[tuple[int, Tensor]] = []
    batches: list[Batch] = [rows() for _ in range(7)]
    for batch in batches:
        step(model, optimizer, batch)
        state = optimizer.state_dict()["curvature"]["blocks"]["2"]["factors"]["output"]
        seen.append((state["updates"], state["basis"]["s"].clone()))
    assert [updates for updates, _ in seen] == [1, 1, 2, 2, 3, 3, 4]
    fresh = [i for i in range(1, 7) if not torch.equal(seen[i][1], seen[i - 1][1])]
    assert fresh == [3, 6]

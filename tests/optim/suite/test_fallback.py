from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkfac
from optim.enrolled import Enrolled
from optim.problems import assert_moved, assert_same_parameters, mlp, parameters, reader, rows, sentences, train, twin

Build = Callable[..., rkfac.KFAC]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_model_without_covered_layers_is_trained_by_sgd_bit_for_bit(
    build: Build, momentum: float, maximize: bool
) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(4)]
    optimizer = build(
        model, lr=0.2, momentum=momentum, maximize=maximize, weight_decay=0.0, exclude="*", fallback="sgd"
    )
    sgd = torch.optim.SGD(other.parameters(), lr=0.2, momentum=momentum, maximize=maximize)
    start = parameters(model)
    train(model, optimizer, batches)
    train(other, sgd, batches)
    assert_moved(model, start)
    assert_same_parameters(model, other, exactly=True)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_adamw_rule_is_torchs(build: Build, decay: float) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(5)]
    settings: dict[str, Any] = {"weight_decay": decay, "weight_decay_from": 0, "exclude": "*", "fallback": "adamw"}
    optimizer = build(model, lr=0.2, momentum=0.0, fallback_scale=1.0, **settings)
    train(model, optimizer, batches)
    train(other, torch.optim.AdamW(other.parameters(), lr=0.2, weight_decay=decay), batches)
    assert_same_parameters(model, other, rtol=1e-12, atol=1e-13)


def test_without_a_graft_sgds_weight_decay_is_decoupled_or_as_the_method_was_published(build: Enrolled) -> None:
    """theta <- (1 - lr w) theta - lr m with m free of the decay, or theta - lr m with w theta in m; from its first step on."""
    model = mlp()
    settings: dict[str, Any] = {"weight_decay": 0.3, "weight_decay_from": 2, "exclude": "*", "fallback": "sgd"}
    optimizer = build(model, lr=0.2, graft=None, momentum=0.5, **settings)
    theta, buffers = parameters(model), {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for k in range(4):
        train(model, optimizer, [rows()])
        for name, p in model.named_parameters():
            decay = 0.3 * (k >= 2)
            buffers[name] = 0.5 * buffers[name] + p.grad + build.coupled * decay * theta[name]
            theta[name] = (1 - (not build.coupled) * 0.2 * decay) * theta[name] - 0.2 * buffers[name]
            torch.testing.assert_close(p.detach(), theta[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
def test_uncovered_parameters_of_a_covered_model_follow_the_rule(build: Build, fallback: str) -> None:
    """The gradients met on the way are fed to torch's own optimizer, which must move the parameter alike."""
    model = reader()
    optimizer = build(model, lr=0.05, momentum=0.9, fallback=fallback, fallback_scale=2.0, factor_every=1)
    shadow = nn.Parameter(model.scale.detach().clone())
    torch_rule: torch.optim.Optimizer = (
        torch.optim.SGD([shadow], lr=0.1, momentum=0.9)
        if fallback == "sgd"
        else torch.optim.AdamW([shadow], lr=0.1, weight_decay=0.0)
    )
    for _ in range(4):
        train(model, optimizer, [sentences()])
        shadow.grad = model.scale.grad.clone()
        torch_rule.step()
        torch.testing.assert_close(model.scale.detach(), shadow.detach(), rtol=1e-12, atol=1e-13)

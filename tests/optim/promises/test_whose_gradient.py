"""Statistics belong to the loss that is stepped on, whatever else was differentiated in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.problems import assert_same_averages, assert_same_parameters, averages, mlp, rows, step, twin, updates

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


def images_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 4), nn.Flatten()
    ).double()


def generator_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))).double()


def test_the_dcgan_loop_counts_each_network_s_own_loss_only() -> None:
    """netD.zero_grad(), real, fake, stepD; netG.zero_grad(), through D, stepG: D's rows of the last are nobody's."""
    D, G = images_net(), generator_net()
    D2, G2 = twin(D), twin(G)
    optimD, optimG = stated.KFAC(D, lr=0.01, **EVERY), stated.KFAC(G, lr=0.01, **EVERY)
    refD, refG = stated.KFAC(D2, lr=0.01, **EVERY), stated.KFAC(G2, lr=0.01, **EVERY)
    bce = nn.BCEWithLogitsLoss()
    one, zero = torch.ones(6, 1).double(), torch.zeros(6, 1).double()
    for _ in range(3):
        real, noise = torch.randn(6, 1, 8, 8).double(), torch.randn(6, 5).double()

        D.zero_grad()
        bce(D(real), one).backward()
        fake = G(noise)
        bce(D(fake.detach()), zero).backward()
        optimD.step()
        G.zero_grad()
        (1000 * bce(D(fake), one)).backward()
        optimG.step()

        # The same with every foreign gradient kept away from the layers that must not see it.
        refD.zero_grad()
        bce(D2(real), one).backward()
        fake = G2(noise)
        bce(D2(fake.detach()), zero).backward()
        refD.step()
        refG.zero_grad()
        with refD.unhooked() if hasattr(refD, "unhooked") else torch.enable_grad():
            loss = 1000 * bce(D2(fake), one)
        loss.backward(inputs=list(G2.parameters()))
        refG.step()
    assert updates(optimD) == updates(optimG) == {3}
    assert_same_averages(optimD, refD)
    assert_same_averages(optimG, refG)
    assert_same_parameters(D, D2)
    assert_same_parameters(G, G2)


def drop_by_model(model: nn.Module) -> None:
    model.zero_grad()


def drop_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def drop_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("drop", [drop_by_model, drop_in_place, drop_by_hand])
def test_what_was_counted_for_a_dropped_gradient_is_dropped(drop: Any, fisher: str) -> None:
    model = mlp()
    other, foreign, own = twin(model), rows(), rows()
    optimizer, reference = (stated.KFAC(m, lr=0.0, fisher=fisher, **EVERY) for m in (model, other))
    (100 * F.cross_entropy(model(foreign[0]), foreign[1])).backward()
    drop(model)
    F.cross_entropy(model(own[0]), own[1]).backward()
    optimizer.step()
    if fisher == "mc":
        reference._capture.draws = 1  # the dropped pass drew too
    F.cross_entropy(other(own[0]), own[1]).backward()
    reference.step()
    assert_same_averages(optimizer, reference)


def test_a_gradient_dropped_right_before_the_step_leaves_no_statistics() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = stated.KFAC(model, **EVERY)
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    optimizer.step()
    assert updates(optimizer) == {0}


def test_clipped_and_scaled_gradients_are_not_dropped() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = stated.KFAC(model, **EVERY)
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert updates(optimizer) == {1}


def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """PGD: three steps with torch.autograd.grad with respect to the inputs."""
    moved = x.clone()
    for _ in range(3):
        moved.requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        moved = (moved + 0.1 * g.sign()).detach()
    return moved


def attacked_by_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """FGSM with .backward(), whose weight gradients are then thrown away."""
    moved = x.clone().requires_grad_(True)
    F.cross_entropy(model(moved), y).backward()
    model.zero_grad()
    assert moved.grad is not None
    return (x + 0.1 * moved.grad.sign()).detach()


@pytest.mark.parametrize("attack", [adversarial, attacked_by_backward])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_adversarial_training_counts_the_stepped_loss_only(attack: Any, fisher: str) -> None:
    model = mlp()
    other, (x, y) = twin(model), rows()
    optimizer = stated.KFAC(model, lr=0.0, fisher=fisher, **EVERY)
    reference = stated.KFAC(other, lr=0.0, fisher=fisher, **EVERY)
    optimizer.zero_grad()
    hard = attack(model, x, y)
    F.cross_entropy(model(hard), y).backward()
    optimizer.step()
    if fisher == "mc":
        reference._capture.draws = optimizer.state_dict()["curvature"]["draws"] - 1  # attacks draw too
    step(other, reference, (hard, y))
    assert_same_averages(optimizer, reference)
    assert updates(optimizer) == {1}


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return 10 * (g.norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty_in_a_backward_of_its_own_leaves_the_plain_loss_s_statistics() -> None:
    """WGAN-GP: the inner autograd.grad never reaches a weight."""
    model = critic()
    other, x, real = twin(model), rows()[0], rows()[0]
    optimizer, reference = (stated.KFAC(m, lr=0.0, **EVERY) for m in (model, other))
    optimizer.zero_grad()
    (model(x).mean() - model(real).mean()).backward()
    value = penalty(model, x)
    assert value.requires_grad
    optimizer.step()
    reference.zero_grad()
    (other(x).mean() - other(real).mean()).backward()
    reference.step()
    assert_same_averages(optimizer, reference)


def test_wgan_gp_trains_and_its_layers_stay_preconditioned() -> None:
    """One loss with the penalty in it: a few steps, factors of a sensible size, no layer retired as foreign."""
    model = critic()
    plain = twin(model)
    optimizer, reference = (stated.KFAC(m, lr=0.0, factor_start="unbiased", **EVERY) for m in (model, plain))
    for _ in range(3):
        x, real = rows()[0], rows()[0]
        optimizer.zero_grad()
        (model(x).mean() - model(real).mean() + penalty(model, x)).backward()
        optimizer.step()
        reference.zero_grad()
        (plain(x).mean() - plain(real).mean()).backward()
        reference.step()
    assert all(record.covered and not record.reason for record in optimizer.report())
    mine, theirs = averages(optimizer), averages(reference)
    for name in mine:
        ratio = float(mine[name].trace() / theirs[name].trace())
        assert 0.2 < ratio < 200, (name, ratio)  # the penalty adds rows of its own, not orders of magnitude


def test_saliency_between_backward_and_step_counts_for_nothing() -> None:
    model = mlp()
    other, (x, y) = twin(model), rows()
    optimizer, reference = (stated.KFAC(m, lr=0.0, **EVERY) for m in (model, other))
    F.cross_entropy(model(x), y).backward()
    torch.autograd.grad(1e3 * model(x.clone().requires_grad_(True)).sum(), list(model.parameters())[:2])
    optimizer.step()
    step(other, reference, (x, y))
    assert_same_averages(optimizer, reference)


@pytest.mark.parametrize("zero", ["optimizer", "model", "zeros"])
def test_a_step_that_a_gradient_scaler_skips_counts_nothing(zero: str) -> None:
    """The scaler does not call the optimizer: that the gradients were dropped is what tells it."""
    model = mlp()
    other = twin(model)
    optimizer, reference = (stated.KFAC(m, lr=0.1, momentum=0.9, **EVERY) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for spoilt in (False, True, True, False, False):
        x, y = rows()
        if zero == "optimizer":
            optimizer.zero_grad()
        else:
            model.zero_grad(set_to_none=zero == "model")
        scaler.scale(F.cross_entropy(model(x), y) * (torch.inf if spoilt else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not spoilt:
            step(other, reference, (x, y))
    assert updates(optimizer) == {3}
    assert_same_averages(optimizer, reference)
    assert_same_parameters(model, other)

"""KLD-WRM's "qe": inner steps down the exact divergences to the last networks, against what is written down apart from it."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_parameters,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    same,
    sentences,
    step,
    train,
    twin,
)
from optim.test_trajectory import batches, network, weights_and_biases
from oracles import numpy_kldwrm
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.randomness import repeated
from rkfac.linalg import host, kronecker, measured
from rkfac.optim import directing, gate, planning
from rkfac.optim.rules import base as rules
from rkfac.optim.wake import NAME

RHO, DAMPING = 0.6, 0.3
EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "factor_decay": RHO}
ABSOLUTE: dict[str, Any] = {"damping": DAMPING, "relative_to": None, "factor_start": "identity"}
HEAVY = rkfac.InnerSteps(weight=1.0)  # the networks matter as much as the model says
EARLY = rkfac.InnerSteps(steps=3, networks=1, weight=1.0)  # from the first step on


def exact(model: nn.Module, inner: rkfac.InnerSteps | None = HEAVY, **keywords: Any) -> rkfac.KLDWRM:
    return stated.KLDWRM(model, variant="qe", inner=inner, **keywords)


# --- thirty steps


@pytest.mark.parametrize(
    ("rule", "periods", "clips", "weight"),
    [
        ("factored", (1, 1), (1e9, 2.0), 1.0),
        ("product", (2, 6), (0.05, 0.01), 1.0),
        ("product", (1, 1), (0.05, 0.01), 5.0),
        ("factored", (2, 6), (1e9, 2.0), 1 / 660),
    ],
)
def test_thirty_steps_agree_with_numpy(
    rule: str, periods: tuple[int, int], clips: tuple[float, float], weight: float
) -> None:
    model, data = network(), batches()
    rate = lambda k: 0.02 * (1 + math.sin(k)) + 0.005  # noqa: E731
    optimizer = exact(
        model,
        rkfac.InnerSteps(weight=weight, clip=clips[1]),
        damping_rule=rule,
        weight_decay=0.01,
        update_clip=clips[0],
        **{**ABSOLUTE, "factor_decay": RHO},
        factor_every=periods[0],
        inverse_every=periods[1],
    )
    settings: dict[str, Any] = {
        "rule": "factor" if rule == "factored" else "product",
        "learning_rate": rate,
        "rho": RHO,
        "damping": DAMPING,
        "factor_period": periods[0],
        "inverse_period": periods[1],
        "clip": clips[0],
        "weight_decay": 0.01,
    }
    start = weights_and_biases(model)
    history = numpy_kldwrm.train(
        start, data, variant="qe", inner=numpy_kldwrm.Inner(7, 0.1, 0.5, 3, weight, clips[1]), **settings
    )
    without = numpy_kldwrm.train(start, data, variant="q", **settings)
    for k, (x, y) in enumerate(data):
        optimizer.param_groups[0]["lr"] = rate(k)
        step(model, optimizer, (torch.from_numpy(x), torch.from_numpy(y)))
        for mine, theirs in zip(weights_and_biases(model), history[k], strict=True):
            for own, its in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(own, its, rtol=0, atol=1e-8)
    apart = max(np.abs(a[0] - b[0]).max() for a, b in zip(history[-1], without[-1], strict=True))
    assert apart > 1e-4, "the inner steps made no difference"


# --- the objective


def batch_curvature(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """(G + l) (x) (A + l) of each Linear layer of a network, by hand; rows of the matrix first, bias last."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    h = x
    for name, module in model.named_children():
        before, h = h, module(h)
        if isinstance(module, nn.Linear):
            h.retain_grad()
            kept[name] = (before.detach(), h)
    gradients = torch.autograd.grad(F.cross_entropy(h, y), [out for _, out in kept.values()])
    found = {}
    for (name, (a, _)), g in zip(kept.items(), gradients, strict=True):
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
        A, G = a.mT @ a / len(a), len(a) * g.mT @ g
        one = lambda M: DAMPING * torch.eye(len(M), dtype=M.dtype)  # noqa: E731
        found[name] = torch.kron(G + one(G), A + one(A))
    return found


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "own rates and decays"])
def test_one_inner_step_follows_the_gradient_of_the_objective(groups: bool) -> None:
    """g^T s + s^T B s / 2 + weight / lr Dbar, written down as such and left to autograd."""
    torch.manual_seed(0)
    model = mlp()
    other = twin(model)
    inner = rkfac.InnerSteps(steps=1, lr=0.5, weight=0.7, clip=None)
    settings: dict[str, Any] = {"lr": 0.2, **EVERY, **ABSOLUTE}

    def params(m: nn.Module) -> Any:
        if not groups:
            return None
        first = [*m[0].parameters(), m[2].bias]
        return [
            {"params": first, "lr": 0.1, "factor_decay": 0.3},
            {"params": [p for p in m.parameters() if all(p is not q for q in first)]},
        ]

    optimizer, plain = exact(model, inner, params=params(model), **settings), None
    plain = stated.KLDWRM(other, variant="q", params=params(other), **settings)
    data, networks = [rows() for _ in range(3)], []
    for batch in data[:2]:
        networks.append(parameters(model))
        step(model, optimizer, batch)
        step(other, plain, batch)
        assert_same_parameters(model, other, exactly=True)
    networks.append(parameters(model))
    x, y = data[2]
    B = batch_curvature(twin(model), x, y)
    step(model, optimizer, data[2])
    step(other, plain, data[2])
    start, gradient = networks[-1], {name: p.grad for name, p in other.named_parameters()}

    def objective(theta: dict[str, Tensor], lr: float, rho: float) -> Tensor:
        s = {name: theta[name] - start[name] for name in theta}
        value = sum((gradient[name] * s[name]).sum() for name in s)
        for name, matrix in B.items():
            whole = torch.cat([s[f"{name}.weight"], s[f"{name}.bias"][:, None]], 1).reshape(-1)
            value = value + whole @ matrix @ whole / 2
        p = Categorical(logits=functional_call(other, theta, (x,)))
        folded = torch.zeros((), dtype=torch.float64)
        for old in networks:
            q = Categorical(logits=functional_call(other, old, (x,)))
            folded = rho * folded + (1 - rho) * (kl_divergence(p, q) + kl_divergence(q, p)).mean() / 2
        return value + 0.7 / lr * folded

    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    end = {name: value.requires_grad_() for name, value in parameters(other).items()}
    for name, p in model.named_parameters():
        group = group_of[id(p)]
        (own,) = torch.autograd.grad(objective(end, group["lr"], group["factor_decay"]), [end[name]])
        torch.testing.assert_close(p.detach(), end[name].detach() - 0.5 * group["lr"] * own, rtol=1e-10, atol=1e-12)
        assert own.abs().max() > 1e-3


def test_without_divergences_inner_steps_go_to_the_minimiser_of_the_quadratic() -> None:
    """And they need no call of the model: gradients by hand are enough."""
    model = mlp()
    inner = rkfac.InnerSteps(steps=400, lr=1.0, networks=1, weight=0.0, clip=None)
    periods: dict[str, Any] = {"factor_every": 50, "inverse_every": 50, "factor_decay": RHO}
    optimizer = exact(model, inner, lr=0.2, **{**ABSOLUTE, "damping": 0.7}, **periods)
    step(model, optimizer, rows())
    before = {p: p.detach().clone() for p in model.parameters()}
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for block in optimizer._blocks.values():
        change = tuple(p.detach() - before[p] for p in block.parameters)
        for product, p in zip(block.multiply(change, optimizer.param_groups[0]), block.parameters, strict=True):
            torch.testing.assert_close(product, -p.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keywords", [{"steps": 0}, {"steps": 5, "networks": 100}], ids=str)
def test_without_inner_steps_it_is_q_bit_for_bit(keywords: dict[str, Any]) -> None:
    model = reader()
    other, data = twin(model), [sentences() for _ in range(5)]
    train(model, exact(model, rkfac.InnerSteps(**keywords), lr=0.1, **EVERY), data)
    train(other, stated.KLDWRM(other, variant="q", lr=0.1, **EVERY), data)
    assert_same_parameters(model, other, exactly=True)


def test_the_first_two_steps_are_those_of_q_and_the_third_is_not() -> None:
    model = mlp()
    other, data = twin(model), [rows() for _ in range(3)]
    optimizer, plain = exact(model, None, lr=0.1, **EVERY), stated.KLDWRM(other, variant="q", lr=0.1, **EVERY)
    for batch in data[:2]:
        step(model, optimizer, batch)
        step(other, plain, batch)
        assert_same_parameters(model, other, exactly=True)
    step(model, optimizer, data[2])
    step(other, plain, data[2])
    assert_moved(model, parameters(other))


def test_the_memory_counts_the_whole_step() -> None:
    """past * lr becomes h + F s with the step s as it was, decay and all clips off."""
    model = mlp()
    optimizer = exact(model, EARLY, lr=0.2, factor_every=50, inverse_every=50, factor_decay=RHO)
    step(model, optimizer, rows())
    for lr in (0.2, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        h = {p: RHO * optimizer.state[p]["past_lr"] * optimizer.state[p]["past"] for p in model.parameters()}
        before = [p.detach().clone() for p in model.parameters()]
        step(model, optimizer, rows())
        moved = iter([p.detach() - old for p, old in zip(model.parameters(), before, strict=True)])
        for block in optimizer._blocks.values():
            products = block.multiply(tuple(itertools.islice(moved, 2)), optimizer.param_groups[0])
            for product, p in zip(products, block.parameters, strict=True):
                torch.testing.assert_close(lr * optimizer.state[p]["past"], h[p] + product, rtol=1e-9, atol=1e-12)


# --- divergences


def of(kind: str, output: Tensor) -> Any:
    made = {
        "categorical": lambda: Categorical(logits=output),
        "gaussian": lambda: Normal(output, 1.0),
        "bernoulli": lambda: Bernoulli(logits=output),
    }
    return made[kind]()


LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": rkfac.Categorical(),
    "gaussian": rkfac.Gaussian(),
    "bernoulli": rkfac.Bernoulli(),
}


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_divergence_is_the_mean_of_torchs_two(kind: str) -> None:
    a, b = torch.randn(7, 5, dtype=torch.float64), 3 * torch.randn(7, 5, dtype=torch.float64)
    p, q = of(kind, a), of(kind, b)
    expected = (kl_divergence(p, q) + kl_divergence(q, p)).sum() / 2
    likelihood = LIKELIHOODS[kind]
    torch.testing.assert_close(likelihood.divergence(a, b), expected)
    assert likelihood.divergence(a, a) == 0
    torch.testing.assert_close(likelihood.divergence(b, a), likelihood.divergence(a, b))
    assert likelihood.divergence(a.bfloat16(), b.bfloat16()).dtype == torch.float32


def test_classes_may_be_anywhere() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    flat = rkfac.Categorical().divergence(a.movedim(1, -1).reshape(-1, 4), b.movedim(1, -1).reshape(-1, 4))
    torch.testing.assert_close(rkfac.Categorical(class_dim=1).divergence(a, b), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_extreme_logits_have_a_finite_divergence_and_gradient(scale: float, dtype: torch.dtype) -> None:
    for likelihood in (rkfac.Categorical(), rkfac.Bernoulli()):
        a = (scale * torch.randn(6, 4)).to(dtype).requires_grad_()
        D = likelihood.divergence(a, -a.detach())
        (gradient,) = torch.autograd.grad(D, [a])
        assert torch.isfinite(D)
        assert torch.isfinite(gradient).all()


def test_a_class_that_both_leave_out_counts_for_nothing() -> None:
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    expected = rkfac.Categorical().divergence(a[:, :3], b[:, :3])
    mask = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    D = rkfac.Categorical().divergence(a + mask, b + mask)
    torch.testing.assert_close(D, expected)
    (gradient,) = torch.autograd.grad(D, [a])
    (its,) = torch.autograd.grad(expected, [a])
    torch.testing.assert_close(gradient, its)
    assert rkfac.Categorical().divergence(a + mask, b) == math.inf


def pulls(optimizer: rkfac.KLDWRM, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradient of the divergence (rho = 0) between the model as it is and with these parameters, on the last batch."""
    wake = optimizer._wake
    assert wake is not None
    now = {name: p.detach() for name, p in optimizer._model.named_parameters()}
    with torch.no_grad(), repeated(torch.Generator(), []) as again:
        return wake._distance([now], again).gradients(theta, {0.0: list(theta)})


@pytest.mark.parametrize("average", ["batch", "tokens", "sum"])
@pytest.mark.parametrize(
    ("kind", "positions"), [("categorical", ()), ("categorical", (6,)), ("gaussian", ()), ("bernoulli", ())]
)
def test_nearby_a_divergence_is_half_the_square_under_the_curvature(
    kind: str, average: str, positions: tuple[int, ...]
) -> None:
    """Of one layer with one input K-FAC's block is the Fisher itself, which the statistics tell up to what was drawn."""
    likelihood = rkfac.Categorical(class_dim=-1) if kind == "categorical" else LIKELIHOODS[kind]
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = exact(
        model, EARLY, lr=0.0, loss_average=average, fisher="mc", likelihood=likelihood, damping=1e-9, relative_to=None,
        factor_every=1, inverse_every=1,
    )  # fmt: skip
    n = 6000 // math.prod(positions)
    x = torch.randn(4, dtype=torch.float64).expand(n, *positions, 4)
    for part in x.split(n // 2):  # accumulated
        model(part).sum().backward()
    calls = list(optimizer._wake._recorder.calls)
    assert len(calls) == 2
    optimizer.step()
    optimizer._wake._recorder.calls = calls
    s = {name: 1e-4 * torch.randn_like(p) for name, p in model.named_parameters()}
    found = pulls(optimizer, {name: p.detach() + s[name] for name, p in model.named_parameters()})
    expected = optimizer._blocks[""].multiply((s["weight"], s["bias"]), optimizer.param_groups[0])
    for product, gradient in zip(expected, found.values(), strict=True):
        torch.testing.assert_close(gradient, product, rtol=0.1, atol=0.1 * float(product.abs().max()))


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("average", ["batch", "tokens", "sum"])
def test_nearby_a_divergence_is_half_the_square_under_the_explicit_fisher(kind: str, average: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = exact(model, EARLY, lr=0.0, likelihood=kind, loss_average=average)
    x = torch.randn(5, 3, dtype=torch.float64)
    model(x).square().sum().backward()
    names = [name for name, _ in model.named_parameters()]
    theta = {name: p.detach() for name, p in model.named_parameters()}
    outputs = torch.func.jacrev(lambda t: functional_call(model, t, (x,)))(theta)
    J = torch.cat([outputs[name].flatten(2) for name in names], -1)  # (samples, outputs, parameters)
    o = model(x).detach()
    each = {
        "categorical": lambda: torch.diag_embed(o.softmax(-1)) - o.softmax(-1)[:, :, None] * o.softmax(-1)[:, None],
        "gaussian": lambda: torch.eye(3, dtype=o.dtype).expand(5, 3, 3),
        "bernoulli": lambda: torch.diag_embed(o.sigmoid() * (1 - o.sigmoid())),
    }
    fisher = torch.einsum("nop,noq,nqr->pr", J, each[kind](), J) / len(x)
    s = 1e-5 * torch.randn(len(fisher), dtype=torch.float64)
    sizes = [theta[name].numel() for name in names]
    away = {name: part.reshape(theta[name].shape) for name, part in zip(names, s.split(sizes), strict=True)}
    found = pulls(optimizer, {name: theta[name] + away[name] for name in names})
    gradient = torch.cat([found[name].reshape(-1) for name in names])
    torch.testing.assert_close(gradient, fisher @ s, rtol=1e-3, atol=1e-3 * float((fisher @ s).abs().max()))


# --- what else must stay as it is


def test_buffers_random_numbers_and_gradients_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convnet()[0], nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 4)).double()
    optimizer = exact(model, lr=0.1, **EVERY)
    modes = []
    model[2].register_forward_pre_hook(
        lambda module, args: modes.append(module.training and not optimizer._capture.active)
    )
    for _ in range(4):
        x, y = images()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        state, statistics = torch.get_rng_state(), optimizer._step
        modes.clear()
        optimizer.step()
        assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
        assert torch.equal(torch.get_rng_state(), state)
        assert modes == ([] if statistics < 2 else 10 * [True])  # three networks, seven steps
    assert model[1].num_batches_tracked == 4


def test_dropout_draws_alike_for_all_networks_and_resumes() -> None:
    """D is zero where the networks are one, whatever is dropped."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    optimizer = exact(model, EARLY, lr=0.1, **EVERY)
    x, y = rows()
    F.cross_entropy(model(x), y).backward()
    found = pulls(optimizer, {name: p.detach() for name, p in model.named_parameters()})
    assert all(not g.any() for g in found.values())
    moved = pulls(optimizer, {name: p.detach() + 0.1 for name, p in model.named_parameters()})
    assert any(g.any() for g in moved.values())


@pytest.mark.parametrize("seed", [{"seed": 3}, {"generator": torch.Generator()}], ids=["seed", "generator"])
def test_a_run_with_dropout_is_resumed_bit_for_bit(seed: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    optimizer = exact(model, lr=0.1, **EVERY, **seed)
    data = [rows() for _ in range(8)]
    train(model, optimizer, data[:4])
    other = twin(model)
    fresh = {"generator": torch.Generator()} if "generator" in seed else {}
    resumed = exact(other, lr=0.7, **EVERY, **fresh)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = torch.get_rng_state()
    train(model, optimizer, data[4:])
    torch.set_rng_state(state)
    train(other, resumed, data[4:])
    assert_same_parameters(model, other, exactly=True)
    assert same(resumed.state_dict(), optimizer.state_dict())


def test_what_is_not_covered_takes_its_step_and_stays_there() -> None:
    model = reader()
    model.norm.requires_grad_(False)
    other = twin(model)
    optimizer, plain = exact(model, EARLY, lr=0.1, **EVERY), stated.KLDWRM(other, variant="q", lr=0.1, **EVERY)
    batch = sentences()
    step(model, optimizer, batch)
    step(other, plain, batch)
    mine, theirs = parameters(model), parameters(other)
    differing = {name for name in mine if not torch.equal(mine[name], theirs[name])}
    assert differing == {"embedding.weight", "hidden.weight", "hidden.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_sixteen_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = mlp(dtype=dtype)
    start = parameters(model)
    optimizer = exact(model, lr=0.1, **EVERY)
    x = torch.randn(64, 6, dtype=dtype)
    batch = x, x[:, :4].argmax(1)
    losses = [step(model, optimizer, batch) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.isfinite(p).all() and p.dtype == dtype for p in model.parameters())
    assert_moved(model, start)


def test_autocast_is_what_it_was_at_the_call() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = exact(model, EARLY, lr=0.1, **EVERY)
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    x, y = rows(dtype=torch.float32)
    for enabled in (True, False):
        optimizer.zero_grad()
        seen.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert seen == 5 * [torch.bfloat16 if enabled else torch.float32]


@pytest.mark.parametrize(("rate", "last"), [(0.0, 0.1), (1e-300, 0.1), (1e-20, 1e12)])
def test_a_rate_of_zero_or_as_good_as_zero_moves_nothing(rate: float, last: float) -> None:
    model = mlp()
    optimizer = exact(model, lr=0.1, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    optimizer.param_groups[0]["lr"] = rate
    for p in model.parameters():
        optimizer.state[p]["past_lr"] = last
    start, past = parameters(model), {p: optimizer.state[p]["past"].clone() for p in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [rows()])
    assert same(parameters(model), start)
    for p in model.parameters():
        torch.testing.assert_close(optimizer.state[p]["past"], RHO * past[p])


def test_other_arguments_outputs_and_ways_to_call() -> None:
    """Keywords, nested arguments, a dictionary with logits: the same steps as the plain call's."""

    class Wrapped(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, *, batch: dict[str, Any]) -> dict[str, Any]:
            h = batch["parts"][0] + batch["parts"][1]
            return {"loss": None, "logits": self.net(h), "hidden": h}

    net = mlp()
    model, other = Wrapped(net), twin(net)
    optimizer, plain = exact(model, lr=0.1, **EVERY), exact(other, lr=0.1, **EVERY)
    for x, y in (rows() for _ in range(4)):
        optimizer.zero_grad()
        F.cross_entropy(model(batch={"parts": [x / 2, x / 2]})["logits"], y).backward()
        optimizer.step()
        step(other, plain, (x, y))
    assert_same_parameters(net, other)


@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_a_compiled_model_takes_the_same_steps(way: str) -> None:
    """Wrapped, its graph stays whole; in place, its entrance breaks it."""
    torch._dynamo.reset()
    model = mlp()
    other, data = twin(model), [rows() for _ in range(5)]
    running: Any = model
    if way == "wrapped":
        running = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager")
    periods: dict[str, Any] = {"factor_every": 2, "inverse_every": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(running, exact(running, lr=0.1, **periods), data)
    train(other, exact(other, lr=0.1, **periods), data)
    assert_same_parameters(running, other)
    torch._dynamo.reset()


# --- which calls count


def counted(model: nn.Module) -> tuple[rkfac.KLDWRM, Callable[[], list[int]]]:
    optimizer = exact(model, EARLY, lr=0.1, **EVERY)
    return optimizer, lambda: [len(call.args[0]) for call in optimizer._wake._recorder.calls]


def test_calls_count_when_a_gradient_has_come_of_them() -> None:
    model = mlp()
    optimizer, calls = counted(model)
    x, y = rows()
    model(x[:1])  # nobody differentiates it
    with torch.no_grad():
        model(x[:2])
    attacked = x[:3].clone().requires_grad_()
    torch.autograd.grad(model(attacked).sum(), attacked)
    torch.func.grad(lambda t: functional_call(model, t, (x[:4],)).sum())(dict(model.named_parameters()))
    functional_call(model, {"0.bias": torch.zeros(8, dtype=torch.float64)}, (x[:4],)).sum().backward()
    assert calls() == []
    loss = F.cross_entropy(model(x[:5]), y[:5])
    optimizer.zero_grad()  # between forward and backward
    loss.backward()
    assert calls() == [5]
    twice = F.cross_entropy(model(x[:6]), y[:6])
    twice.backward(retain_graph=True)
    twice.backward()
    (model(x[:7]).sum() + model(x[:8]).sum()).backward()
    assert sorted(calls()) == [5, 6, 7, 8]
    optimizer.step()
    assert calls() == []


def test_a_call_counts_whose_output_is_a_view_that_was_changed_in_place() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4)).double()
    _, calls = counted(model)
    tokens = torch.randint(9, (5, 7))
    model(tokens).mul_(2).square().sum().backward()
    assert calls() == [5]


@pytest.mark.parametrize("way", ["optimizer", "model", "zeros", "one by one"])
def test_calls_are_dropped_with_their_gradients(way: str) -> None:
    model = mlp()
    optimizer, calls = counted(model)
    x, y = rows()
    F.cross_entropy(model(x), y).backward()
    if way == "one by one":
        for p in model.parameters():
            p.grad = None
    else:
        zero = {"optimizer": optimizer.zero_grad, "model": model.zero_grad}.get(way, model.zero_grad)
        zero(set_to_none=way != "zeros")
    F.cross_entropy(model(x[:5]), y[:5]).backward()
    assert calls() == [5]


def test_a_step_that_a_scaler_skips_leaves_no_calls() -> None:
    model = mlp(dtype=torch.float32)
    optimizer, calls = counted(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = rows(dtype=torch.float32)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    model[0].weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert calls() == []


# --- trouble


class Spoiled(rkfac.Categorical):
    """Divergences that are not finite while `spoils` holds."""

    spoils = True

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        return super().divergence(output, other) * (math.nan if Spoiled.spoils else 1.0)


def test_inner_steps_that_are_not_finite_leave_the_step_of_q() -> None:
    model = mlp()
    other, data = twin(model), [rows() for _ in range(4)]
    optimizer = exact(model, EARLY, lr=0.1, likelihood=Spoiled(), **EVERY)
    plain = stated.KLDWRM(other, variant="q", lr=0.1, **EVERY)
    for batch in data[:2]:
        with pytest.warns(UserWarning, match=NAME) as caught:
            step(model, optimizer, batch)
        assert caught[0].filename.endswith("problems.py"), "the warning does not point to the step"
        step(other, plain, batch)
        assert_same_parameters(model, other, exactly=True)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[p]["past"], plain.state[q]["past"])
    start, state = parameters(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=f"{NAME}.*3 times in a row.*intact"):
        step(model, optimizer, data[2])
    assert same(parameters(model), start)
    assert same(optimizer.state_dict()["state"], state["state"])
    assert same(optimizer.state_dict()["curvature"]["networks"], state["curvature"]["networks"])
    Spoiled.spoils = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer, data[3])
    finally:
        Spoiled.spoils = True
    assert_moved(model, start)


def test_elsewhere_than_on_a_cpu_nothing_waits_and_the_step_of_q_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (host, kronecker, measured, gate, planning, directing, rules):
        monkeypatch.setattr(room, "at_once", lambda tensor: False)
    model = mlp()
    other, data = twin(model), [rows() for _ in range(4)]
    optimizer = exact(model, EARLY, lr=0.1, likelihood=Spoiled(), max_failures=2, **EVERY)
    plain = stated.KLDWRM(other, variant="q", lr=0.1, **EVERY)
    step(model, optimizer, data[0])
    step(other, plain, data[0])
    assert_same_parameters(model, other, exactly=True)
    with pytest.warns(UserWarning, match=NAME):
        step(model, optimizer, data[1])
    step(other, plain, data[1])
    assert_same_parameters(model, other, exactly=True)
    with pytest.raises(RuntimeError, match=f"{NAME}.*2 times in a row"):
        step(model, optimizer, data[2])
    assert_same_parameters(model, other, exactly=True)


def test_elsewhere_the_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reader()
    other, data = twin(model), [sentences() for _ in range(4)]
    train(other, exact(other, EARLY, lr=0.1, **EVERY), data)
    for room in (host, kronecker, measured, gate, planning, directing, rules):
        monkeypatch.setattr(room, "at_once", lambda tensor: False)
    train(model, exact(model, EARLY, lr=0.1, **EVERY), data)
    assert_same_parameters(model, other)


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_error_on_the_way_leaves_everything_as_it_was(at: int, momentum: float) -> None:
    """Whenever it comes: while the networks are looked at, or between inner steps."""
    model = reader()
    optimizer = exact(model, EARLY, lr=0.1, momentum=momentum, fallback="adamw", **EVERY)
    train(model, optimizer, [sentences() for _ in range(2)])
    x, y = sentences()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    start, state = parameters(model), copy.deepcopy(optimizer.state_dict()["state"])
    seen = [0]

    def fails(module: nn.Module, args: Any) -> None:
        seen[0] += 1
        if seen[0] == at:
            raise KeyError("no memory")

    handle = model.head.register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="no memory"):
        optimizer.step()
    handle.remove()
    assert same(parameters(model), start)
    assert same(optimizer.state_dict()["state"], state)
    assert optimizer._capture.active, "statistics are collected no more"
    optimizer.step()
    assert_moved(model, {name: value for name, value in start.items() if name != "norm.bias"})


def test_a_refused_layer_takes_no_inner_steps() -> None:
    model = mlp()
    optimizer = exact(model, EARLY, lr=0.1, **EVERY)
    train(model, optimizer, [rows() for _ in range(2)])
    start, past = parameters(model), {p: optimizer.state[p]["past"].clone() for p in model.parameters()}
    x, y = rows()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="'2'"):
        optimizer.step()
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, start[name])}
    assert moved == {"0.weight", "0.bias", "4.weight", "4.bias"}
    for p in model[2].parameters():
        torch.testing.assert_close(optimizer.state[p]["past"], RHO * past[p], rtol=1e-12, atol=0)


class Returning(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.what = mlp(), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.net(x))


def refused(model: nn.Module, run: Callable[[], Any], error: type[Exception], match: str, **keywords: Any) -> None:
    """By name, with nothing moved."""
    optimizer = exact(model, EARLY, lr=0.1, **EVERY, **keywords)
    run()
    start, state = parameters(model), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error, match=match):
        optimizer.step()
    assert same(parameters(model), start)
    # Buffers that a step needs are made before anything moves.
    after = optimizer.state_dict()["state"]
    assert all(not v.any() for k, s in after.items() if k not in state for v in s.values() if isinstance(v, Tensor))


def test_what_cannot_be_run_again_is_refused_by_name() -> None:
    x, y = rows()
    net = mlp()
    refused(net, lambda: net[2:](net[:2](x)).sum().backward(), RuntimeError, "'qe'.*model itself")
    odd = Returning(lambda out: (out, out.sum()))
    refused(odd, lambda: F.cross_entropy(odd(x)[0], y).backward(), TypeError, "'qe'.*returned tuple")
    alone = Returning(lambda out: out.sum())
    refused(alone, lambda: alone(x).backward(), ValueError, "'qe'.*not logits")
    net = mlp()

    def changed() -> None:
        inputs = x.clone()
        F.cross_entropy(net(inputs), y).backward()
        inputs.mul_(2)

    refused(net, changed, RuntimeError, "'qe'.*changed in place")
    inside = nn.Sequential(nn.ReLU(inplace=True), mlp())
    refused(inside, lambda: inside(x.clone()).sum().backward(), RuntimeError, "'qe'.*changed in place")
    text = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4)).double()
    tokens = torch.randint(9, (5, 7))
    refused(text, lambda: text(tokens).sum().backward(), ValueError, "'qe'.*class_dim")
    refused(
        text, lambda: text(tokens).sum().backward(), ValueError, "'qe'.*positions", likelihood="gaussian",
        loss_average="tokens",
    )  # fmt: skip


def test_a_reentrant_checkpoint_is_refused_by_name() -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(6, 6).double(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.rest, self.first(x), use_reentrant=True)

    model, (x, y) = Recomputing(), rows()
    refused(model, lambda: F.cross_entropy(model(x), y).backward(), RuntimeError, "'qe'.*use_reentrant=False")


def test_a_closed_optimizer_is_refused_by_name() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = exact(model, EARLY, lr=0.1, **EVERY)
    step(model, optimizer, (x, y))
    optimizer.close()
    start = parameters(model)
    with pytest.raises(RuntimeError, match=r"'qe'.*close"):
        step(model, optimizer, (x, y))
    assert same(parameters(model), start)


def test_a_layer_that_was_exchanged_ends_the_wake() -> None:
    model = mlp()
    optimizer = exact(model, lr=0.1, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    model[4] = nn.Linear(7, 5).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, [rows() for _ in range(4)])
    assert all(torch.isfinite(p).all() for p in model.parameters())


# --- arguments and memory


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, values in {
            "steps": [-1, 1.5, True, None],
            "lr": [0.0, -0.1, math.nan, "x", None],
            "momentum": [1.0, -0.1, math.nan],
            "networks": [0, 2.5, True],
            "weight": [-1.0, math.inf, None],
            "clip": [0.0, -1.0, math.nan, "x"],
        }.items()
        for value in values
    ],
)
def test_bad_inner_steps_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"inner.{name}"):
        rkfac.InnerSteps(**{name: value})


@pytest.mark.parametrize(
    "keywords",
    [
        {"inner": 7},
        {"inner": rkfac.InnerSteps},
        {"inner": rkfac.InnerSteps(), "variant": "q"},
        {"likelihood": "poisson"},
    ],
    ids=str,
)
def test_arguments_without_meaning_are_refused_by_name(keywords: dict[str, Any]) -> None:
    model, name = mlp(), next(iter(keywords))
    with pytest.raises(ValueError, match=name):
        rkfac.KLDWRM(model, **{"variant": "qe", **keywords})
    assert not model._forward_hooks


def test_a_likelihood_without_a_divergence_is_refused() -> None:
    class Own(Likelihood):
        def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
            return output

        def terms(self, output: Tensor) -> int:
            return len(output)

    with pytest.raises(ValueError, match=r"likelihood.*divergence"):
        rkfac.KLDWRM(mlp(), variant="qe", likelihood=Own())
    rkfac.KLDWRM(mlp(), variant="q", likelihood=Own())


def test_saved_networks_that_are_damaged_are_refused_and_change_nothing() -> None:
    model = mlp()
    optimizer = exact(model, lr=0.1, **EVERY)
    train(model, optimizer, [rows() for _ in range(4)])
    saved = copy.deepcopy(optimizer.state_dict())
    assert [set(network) for network in saved["curvature"]["networks"]] == 2 * [set(parameters(model))]
    for spoil in (
        lambda networks: networks.append(networks[0]),
        lambda networks: networks[0].update(strange=torch.zeros(2)),
        lambda networks: networks[0].update({"0.weight": torch.zeros(3, dtype=torch.float64)}),
        lambda networks: networks[0].update({"0.weight": networks[0]["0.weight"].float()}),
        lambda networks: networks[1].update({"0.weight": 3.0}),
        lambda networks: networks[1]["0.weight"].fill_(math.nan),
        lambda networks: networks.__setitem__(0, None),
    ):
        damaged = copy.deepcopy(saved)
        spoil(damaged["curvature"]["networks"])
        with pytest.raises(ValueError, match="network"):
            optimizer.load_state_dict(damaged)
        assert same(optimizer.state_dict(), saved)
    for nothing in ("none", None, {}):
        damaged = copy.deepcopy(saved)
        damaged["curvature"]["networks"] = nothing
        with pytest.raises(ValueError, match="network"):
            optimizer.load_state_dict(damaged)


def test_other_inner_steps_are_another_algorithm() -> None:
    model = mlp()
    saved = exact(model).state_dict()
    for other in (
        exact(twin(model), rkfac.InnerSteps(weight=0.5)),
        exact(twin(model), likelihood="gaussian"),
        stated.KLDWRM(twin(model), variant="q"),
    ):
        with pytest.raises(ValueError, match="another algorithm"):
            other.load_state_dict(saved)


def test_loaded_networks_are_not_shared_with_their_source() -> None:
    model = mlp()
    optimizer = exact(model, lr=0.1, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    follower = exact(twin(model), lr=0.1, **EVERY)
    state = copy.deepcopy(optimizer.state_dict())
    follower.load_state_dict(state)
    before = copy.deepcopy(follower.state_dict())
    for kept in state["curvature"]["networks"]:
        for value in kept.values():
            value.fill_(7.0)
    assert same(follower.state_dict()["curvature"]["networks"], before["curvature"]["networks"])

"""KLD-WRM: its steps are the minimisers of its model, of which nothing but the model is used here."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_parameters,
    mlp,
    parameters,
    reader,
    rows,
    same,
    sentences,
    step,
    twin,
)
from optim.problems import train as trained
from optim.test_trajectory import batches, network, weights_and_biases
from oracles import numpy_kfac, numpy_kldwrm

RATES = (0.3, 0.5, 0.1, 0.1, 0.7, 0.02)  # of the steps that are minimised by brute force
RHO, DAMPING = 0.6, 0.05
EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "factor_decay": RHO}
ABSOLUTE: dict[str, Any] = {"damping": DAMPING, "relative_to": None, "factor_start": "identity"}


def minimiser(objective: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """Of a quadratic, by its gradient and Hessian at zero."""
    zero = torch.zeros(size, dtype=torch.float64)
    return torch.linalg.solve(torch.func.hessian(objective)(zero), -torch.func.grad(objective)(zero))


class StepProblem:
    """The model of section "how it works", written down as a sum over all past steps; nothing is accumulated."""

    def __init__(self, variant: str, size: int, start: Tensor) -> None:
        self.variant = variant
        # The averages start from the identity, a regulariser like the others that is centred at the start.
        self.past = [(torch.eye(size, dtype=torch.float64), start)]

    def step(self, theta: Tensor, gradient: Tensor, fisher: Tensor, lr: float) -> Tensor:
        self.past.append((fisher, theta))
        k = len(self.past) - 1
        weights = [RHO**k] + [(1 - RHO) * RHO ** (k - i) for i in range(1, k + 1)]
        assert sum(weights) == pytest.approx(1)
        damped = [F_i + DAMPING * torch.eye(len(F_i), dtype=torch.float64) for F_i, _ in self.past]

        def objective(s: Tensor) -> Tensor:
            value = gradient @ s
            if self.variant == "q":
                value = value + 0.5 * s @ damped[-1] @ s
            for weight, F_i, (_, theta_i) in zip(weights, damped, self.past, strict=True):
                away = theta + s - theta_i
                value = value + 0.5 * weight / lr * away @ F_i @ away
            return value

        return theta + minimiser(objective, len(theta))


@pytest.mark.parametrize("variant", ["so", "q"])
@pytest.mark.parametrize("sides", ["input", "output"])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
def test_steps_minimise_the_model(variant: str, sides: str, rule: str) -> None:
    """With one side kept, the average of the blocks is the block of the averages: the model has no approximation left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = stated.KLDWRM(model, variant=variant, sides=sides, damping_rule=rule, **{**EVERY, **ABSOLUTE})
    flat = lambda: torch.cat([model.weight, model.bias[:, None]], 1).detach().reshape(-1)  # noqa: E731
    problem, expected = StepProblem(variant, 15, flat()), flat()
    for lr in RATES:
        optimizer.param_groups[0]["lr"] = lr
        x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
        optimizer.zero_grad()
        logits = model(x)
        logits.retain_grad()
        F.cross_entropy(logits, y).backward()
        a, g = torch.cat([x, torch.ones(9, 1, dtype=torch.float64)], 1), logits.grad
        one = torch.eye(3 if sides == "input" else 5, dtype=torch.float64)
        fisher = torch.kron(one, a.mT @ a / 9) if sides == "input" else torch.kron(9 * g.mT @ g, one)
        gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).reshape(-1)
        expected = problem.step(expected, gradient, fisher, lr)
        optimizer.step()
        torch.testing.assert_close(flat(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("variant", ["so", "q"])
def test_steps_of_a_norm_minimise_the_model_with_nothing_left_out(variant: str) -> None:
    """A unit's 2 x 2 block is the Fisher matrix itself, with both variants and all of their memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double().requires_grad_(False)
    norm = model[0].requires_grad_(True)
    optimizer = stated.KLDWRM(model, variant=variant, params=norm.parameters(), **{**EVERY, **ABSOLUTE})
    flat = lambda: torch.stack([norm.weight, norm.bias], 1).detach()  # noqa: E731
    problems, expected = [StepProblem(variant, 2, unit) for unit in flat()], flat()

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, own, (x[None],)), y[None])

    for lr in RATES:
        optimizer.param_groups[0]["lr"] = lr
        x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(3, (7,))
        own = {"0.weight": norm.weight.detach(), "0.bias": norm.bias.detach()}
        each = vmap(grad(loss), (None, 0, 0))(own, x, y)
        u = torch.stack([each["0.weight"], each["0.bias"]], -1)  # (samples, units, 2)
        fisher = torch.einsum("nui,nuj->uij", u, u) / len(x)
        moved = zip(problems, expected, u.mean(0), fisher, strict=True)
        expected = torch.stack([problem.step(theta, g, F_u, lr) for problem, theta, g, F_u in moved])
        step(model, optimizer, (x, y))
        torch.testing.assert_close(flat(), expected, rtol=1e-9, atol=1e-11)


# --- thirty steps


@pytest.mark.parametrize("variant", ["so", "q"])
@pytest.mark.parametrize("rule", ["factored", "product"])
@pytest.mark.parametrize("periods", [(1, 1), (2, 6)], ids=str)
@pytest.mark.parametrize("clip", [1e9, 0.05], ids=["free", "clipped"])
def test_thirty_steps_agree_with_numpy(variant: str, rule: str, periods: tuple[int, int], clip: float) -> None:
    model, data = network(), batches()
    layers = [m for m in model if hasattr(m, "weight")]
    rate = lambda k: 0.02 * (1 + math.sin(k)) + 0.005  # noqa: E731
    optimizer = stated.KLDWRM(
        model,
        variant=variant,
        damping_rule=rule,
        weight_decay=0.01,
        update_clip=clip,
        # Sketched or exact, all modes are kept.
        decomposition=rkfac.RSVD(rank=100) if periods == (1, 1) else rkfac.Exact(),
        **{**ABSOLUTE, "damping": 0.3, "factor_decay": RHO},
        factor_every=periods[0],
        inverse_every=periods[1],
    )
    history = numpy_kldwrm.train(
        [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in layers],
        data,
        variant=variant,
        rule="factor" if rule == "factored" else "product",
        learning_rate=rate,
        rho=RHO,
        damping=0.3,
        factor_period=periods[0],
        inverse_period=periods[1],
        clip=clip,
        weight_decay=0.01,
    )
    start, clipped = parameters(model), 0
    for k, (images, labels) in enumerate(data):
        optimizer.param_groups[0]["lr"] = rate(k)
        step(model, optimizer, (torch.from_numpy(images), torch.from_numpy(labels)))
        clipped += sum(record.clip < 1 for record in optimizer.report())
        for (weight, bias), layer in zip(history[k], layers, strict=True):
            np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=0, atol=1e-8)
            np.testing.assert_allclose(layer.bias.detach().numpy(), bias, rtol=0, atol=1e-8)
    assert (clipped > 20) == (clip < 1), "the clip was not tried"
    assert_moved(model, start)


@pytest.mark.parametrize("variant", ["so", "q"])
@pytest.mark.parametrize(("rule", "periods"), [("factored", (1, 2)), ("product", (2, 6))], ids=str)
def test_thirty_steps_in_truncated_sketches_agree_with_numpy(variant: str, rule: str, periods: tuple[int, int]) -> None:
    """The twin sketches with the same random numbers: a truncation of its own would be another one after few steps."""
    model, data = network(), batches()
    rate = lambda k: 0.02 * (1 + math.sin(k)) + 0.005  # noqa: E731
    generator, source = (torch.Generator().manual_seed(5) for _ in range(2))
    sketch: dict[str, Any] = {"rank": 3, "oversampling": 2, "power_iterations": 2}
    settings: dict[str, Any] = {"damping": 0.3, "relative_to": None, "factor_start": "paper", "factor_decay": RHO}
    optimizer = stated.KLDWRM(
        model,
        variant=variant,
        damping_rule=rule,
        decomposition=rkfac.RSVD(),
        warm_start=False,
        generator=generator,
        update_clip=0.5,
        factor_every=periods[0],
        inverse_every=periods[1],
        **sketch,
        **settings,
    )

    def sketched(factor: np.ndarray) -> np.ndarray:
        draw = lambda d, p: torch.randn(d, p, dtype=torch.float64, generator=source).numpy()  # noqa: E731
        U, values = numpy_kfac.decompose(factor, "rsvd", draw=draw, **sketch)
        return U @ np.diag(values) @ U.T

    history = numpy_kldwrm.train(
        weights_and_biases(model),
        data,
        variant=variant,
        rule="factor" if rule == "factored" else "product",
        learning_rate=rate,
        rho=RHO,
        damping=0.3,
        factor_period=periods[0],
        inverse_period=periods[1],
        clip=0.5,
        weight_decay=0.0,
        sketched=sketched,
    )
    for k, ((images, labels), expected) in enumerate(zip(data, history, strict=True)):
        optimizer.param_groups[0]["lr"] = rate(k)
        step(model, optimizer, (torch.from_numpy(images), torch.from_numpy(labels)))
        for mine, theirs in zip(weights_and_biases(model), expected, strict=True):
            for own, its in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(own, its, rtol=0, atol=1e-8)
    assert {r.rank_input for r in optimizer.report()} == {r.rank_output for r in optimizer.report()} == {3}
    assert torch.equal(generator.get_state(), source.get_state()), "as many numbers were drawn"


# --- limits


def test_without_memory_so_is_kfac() -> None:
    model = reader()
    other, data = twin(model), [sentences() for _ in range(6)]
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.0, **EVERY, "factor_decay": 0.0}
    trained(model, stated.KLDWRM(model, variant="so", **settings), data)
    trained(other, rkfac.KFAC(other, graft=None, **{**stated.STATED, **settings}), data)
    assert_same_parameters(model, other, exactly=True)


def test_so_preconditions_the_difference_of_gradients() -> None:
    """g - rho (lr_1 / lr) g_1, with K-FAC's own preconditioner."""
    model = mlp()
    optimizer = stated.KLDWRM(model, variant="so", lr=0.2, **EVERY)
    step(model, optimizer, rows())
    before = {p: p.grad.clone() for p in model.parameters()}
    optimizer.param_groups[0]["lr"] = 0.05
    x, y = rows()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    # The reference sees the same statistics and another gradient.
    other = twin(model)
    plain = rkfac.KFAC(other, graft=None, **{**stated.STATED, **EVERY, "lr": 0.05, "momentum": 0.0})
    state = copy.deepcopy(optimizer.state_dict())
    state["curvature"]["fingerprint"]["method"] = "None"
    plain.load_state_dict({**state, "state": {}, "param_groups": plain.state_dict()["param_groups"]})
    plain.zero_grad()
    F.cross_entropy(other(x), y).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad -= RHO * (0.2 / 0.05) * before[p]
    optimizer.step()
    plain.step()
    assert_same_parameters(model, other, rtol=1e-9, atol=1e-12)


def test_where_the_batch_is_the_average_q_is_so_within_one_plus_the_rate() -> None:
    """B = F: v = F^-1 g^ / (1 + lr), on a fresh step (the average is the first batch) and on stale ones."""
    for kind in (mlp, reader):
        model = kind()
        other, data = twin(model), (rows if kind is mlp else sentences)()
        rate, start = 0.25, parameters(model)
        settings: dict[str, Any] = {"factor_decay": RHO}
        step(model, stated.KLDWRM(model, variant="q", lr=rate, **settings), data)
        step(other, stated.KLDWRM(other, variant="so", lr=rate / (1 + rate), **settings), data)
        blocks = [name for name in start if name != "scale"]
        mine, theirs = parameters(model), parameters(other)
        for name in blocks:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-12)
            assert not torch.equal(mine[name], start[name])


def test_on_stale_steps_the_curvature_times_the_step_is_the_corrected_gradient() -> None:
    model = mlp()
    optimizer = stated.KLDWRM(model, variant="q", lr=0.3, factor_every=50, inverse_every=50, factor_decay=RHO)
    step(model, optimizer, rows())
    for lr in (0.3, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        past = {p: optimizer.state[p]["past"] * (RHO * optimizer.state[p]["past_lr"] / lr) for p in model.parameters()}
        start = [p.detach().clone() for p in model.parameters()]
        step(model, optimizer, rows())
        change = iter([(old - p.detach()) / lr for p, old in zip(model.parameters(), start, strict=True)])
        for block in optimizer._blocks.values():
            v = tuple(itertools.islice(change, 2))
            for product, p in zip(block.multiply(v, optimizer.param_groups[0]), block.parameters, strict=True):
                torch.testing.assert_close(product, (p.grad + past[p]) / (1 + lr), rtol=1e-9, atol=1e-12)


def test_a_large_damping_leaves_plain_gradients_with_memory() -> None:
    """l^-2 (g - rho g_1): nothing of the curvature is left."""
    model = mlp()
    lr = 0.1 * 1e12
    optimizer = stated.KLDWRM(model, variant="so", lr=lr, damping=1e6, relative_to=None, **EVERY)
    last = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(4):
        start = [p.detach().clone() for p in model.parameters()]
        step(model, optimizer, rows())
        for p, old, g in zip(model.parameters(), start, last, strict=True):
            torch.testing.assert_close(p.detach(), old - 0.1 * (p.grad - RHO * g), rtol=1e-5, atol=1e-6)
        last = [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", ["so", "q"])
def test_of_a_wide_layer_a_few_modes_are_kept_and_the_step_is_the_same(variant: str) -> None:
    """Wide enough for a direction that is never formed: the memory must be among what it is a correction of."""
    torch.manual_seed(0)
    model = nn.Linear(600, 400).double()
    settings: dict[str, Any] = {"rank": 3, "oversampling": 2, "tail": "trace", "factor_every": 2, "inverse_every": 2}
    optimizer = stated.KLDWRM(
        model, variant=variant, lr=0.1, damping=0.5, factor_decay=RHO, decomposition=rkfac.RSVD(), **settings
    )
    block = optimizer._blocks[""]
    past = torch.zeros(400, 601, dtype=torch.float64)
    for k, (lr, following) in enumerate(itertools.pairwise((0.1, 0.05, 0.2, 0.2, 0.2))):
        optimizer.param_groups[0]["lr"] = lr
        start = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
        step(model, optimizer, (torch.randn(50, 600, dtype=torch.float64), torch.randint(400, (50,))))
        gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1) + past
        moved = (start - torch.cat([model.weight, model.bias[:, None]], 1).detach()) / lr
        curved = torch.cat(
            [t.reshape(400, -1) for t in block.multiply((moved[:, :-1], moved[:, -1]), {"damping": 0.5})], 1
        )
        if variant == "so" or k % 2:  # elsewhere the batch's own curvature was in it, too
            shrink = 1.0 if variant == "so" else 1 / (1 + lr)
            torch.testing.assert_close(curved, shrink * gradient, rtol=1e-8, atol=1e-12)
        past = RHO * lr / following * (past - curved)


# --- memory in trouble


@pytest.mark.parametrize("variant", ["so", "q"])
def test_a_rate_of_zero_moves_nothing_and_lets_the_memory_fade(variant: str) -> None:
    model = mlp()
    optimizer = stated.KLDWRM(model, variant=variant, lr=0.1, **EVERY)
    trained(model, optimizer, [rows() for _ in range(3)])
    past = {p: dict(optimizer.state[p], past=optimizer.state[p]["past"].clone()) for p in model.parameters()}
    start = parameters(model)
    for zero in (0.0, 1e-300):
        optimizer.param_groups[0]["lr"] = zero
        trained(model, optimizer, [rows()])
    for name, value in parameters(model).items():
        torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    for p in model.parameters():
        torch.testing.assert_close(optimizer.state[p]["past"], RHO**2 * past[p]["past"])
        assert optimizer.state[p]["past_lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.05
    trained(model, optimizer, [rows()])
    assert_moved(model, start)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("variant", ["so", "q"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_refused_step_is_remembered_as_none(variant: str, fresh: bool) -> None:
    """Nothing moved: the pull of the past fades, and what was not finite is nowhere."""
    model = mlp()
    period = 1 if fresh else 50
    optimizer = stated.KLDWRM(
        model, variant=variant, lr=0.1, factor_decay=RHO, factor_every=period, inverse_every=period
    )
    trained(model, optimizer, [rows() for _ in range(3)])
    past = {p: optimizer.state[p]["past"].clone() for p in model.parameters()}
    x, y = rows()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="'2'"):
        optimizer.step()
    for p in model[2].parameters():
        torch.testing.assert_close(optimizer.state[p]["past"], RHO * past[p], rtol=1e-12, atol=0)
    trained(model, optimizer, [rows()])
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_statistics_of_a_failed_step_are_not_taken_for_the_next_ones() -> None:
    """B is the present batch's curvature, or F: never that of a step that was an error."""
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    settings: dict[str, Any] = {"lr": 0.1, "factor_decay": RHO, "factor_every": 2, "inverse_every": 2}
    optimizer = stated.KLDWRM(model, variant="q", max_failures=1, **settings)
    data = [rows() for _ in range(3)]
    trained(model, optimizer, data[:2])
    optimizer.zero_grad()
    F.cross_entropy(model(data[2][0]), data[2][1]).backward()
    model[4].weight.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="intact"):
        optimizer.step()
    resumed = stated.KLDWRM(other, variant="q", max_failures=1, **settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # By hand: no statistics come with these gradients, and no refresh, so that both must take B = F.
    for m, o in ((model, optimizer), (other, resumed)):
        o.param_groups[0]["inverse_every"] = 1000
        o.zero_grad()
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        o.step()
    assert_same_parameters(model, other, exactly=True)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("variant", ["so", "q"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_of_the_loss_cancels(variant: str, scale: float, dtype: torch.dtype) -> None:
    """v is that of the unscaled loss divided by its scale (relative damping), and the memory is the memory times it."""
    torch.manual_seed(0)
    model = mlp(dtype=dtype)
    other, data = twin(model), [rows(dtype=dtype) for _ in range(4)]
    plain, scaled = (stated.KLDWRM(m, variant=variant, lr=1e-2, sides="output", **EVERY) for m in (model, other))
    for x, y in data:
        for m, o, c in ((model, plain, 1.0), (other, scaled, scale)):
            o.zero_grad()
            (c * F.cross_entropy(m(x), y)).backward()
            o.step()
        assert all(torch.isfinite(p).all() for p in other.parameters())
        other.load_state_dict(model.state_dict())  # a step of another length leads elsewhere
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        ours, theirs = plain.state[p]["past"], scaled.state[q]["past"] / scale
        assert ours.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))


def test_a_saved_memory_that_is_damaged_is_refused() -> None:
    model = mlp()
    optimizer = stated.KLDWRM(model, variant="q", lr=0.1, **EVERY)
    trained(model, optimizer, [rows()])
    saved = copy.deepcopy(optimizer.state_dict())
    for spoil in (
        lambda s: s.pop("past"),
        lambda s: s.pop("past_lr"),
        lambda s: s.update(past_lr=math.nan),
        lambda s: s.update(past_lr=-0.1),
        lambda s: s.update(past=torch.zeros(3)),
        lambda s: s["past"].fill_(math.inf),
    ):
        damaged = copy.deepcopy(saved)
        spoil(damaged["state"][0])
        with pytest.raises(ValueError, match="does not fit"):
            optimizer.load_state_dict(damaged)
        assert same(optimizer.state_dict(), saved)
    # And nobody else takes a memory of steps.
    plain = stated.KFAC(twin(model), graft=None)
    saved["curvature"]["fingerprint"] = plain.state_dict()["curvature"]["fingerprint"]
    with pytest.raises(ValueError, match="past"):
        plain.load_state_dict(saved)


# --- arguments


@pytest.mark.parametrize(
    "keywords",
    [
        {"graft": "sgd"},
        {"graft": "adamw"},
        {"apply": "backward"},
        {"power": -0.5},
        {"adaptive_damping": rkfac.LevenbergMarquardt()},
        {"variant": "Q"},
        {"inner": rkfac.InnerSteps()},
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_by_name(keywords: dict[str, Any]) -> None:
    model = mlp()
    (name,) = keywords
    with pytest.raises(ValueError, match=name):
        rkfac.KLDWRM(model, **keywords)
    assert not model._forward_hooks


def test_the_signature_is_kfacs_and_the_variant() -> None:
    mine, base = (inspect.signature(kind).parameters for kind in (rkfac.KLDWRM, rkfac.KFAC))
    assert mine.keys() - base.keys() == {"variant", "inner"}
    changed = {name: mine[name].default for name in base if mine[name].default != base[name].default}
    assert changed == {"graft": None, "momentum": 0.0, "factor_decay": 0.5, "update_clip": 2.0, "kl_clip": 0.1}


@pytest.mark.parametrize("variant", ["so", "q", "qe"])
def test_defaults_and_the_published_settings_train(variant: str) -> None:
    for keywords in ({"variant": variant}, rkfac.kld_wrm_defaults(variant)):
        torch.manual_seed(0)
        model = mlp()
        x = torch.randn(64, 6, dtype=torch.float64)
        batch = x, x[:, :4].argmax(1)
        optimizer = rkfac.KLDWRM(model, **keywords)
        first = step(model, optimizer, batch)
        for _ in range(60):
            last = step(model, optimizer, batch)
        assert last < 0.8 * first, (first, last)
    with pytest.raises(ValueError, match="variant"):
        rkfac.kld_wrm_defaults("Q")

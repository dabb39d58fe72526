"""Preconditioned gradients against explicit inverses of explicit dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from curvature.brute import Problem, block_of, each_problem, held, kfac, losses, statistics, weight_layers
from rkfac.curvature.block import Direction
from rkfac.curvature.damping import RULES

each_rule = pytest.mark.parametrize("rule", RULES)
each_measure = pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
DAMPING = 0.07


def inverse(X: Tensor, damping: Tensor | float) -> Tensor:
    return torch.linalg.inv(X + damping * torch.eye(len(X), dtype=X.dtype))


def largest(X: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(X)[-1]


def dense(rule: str, relative: bool, J: Tensor, A: Tensor, G: Tensor, damping: float = DAMPING) -> Tensor:
    """S for one group's gradient J (d_out, d_in[+1]), in the words of the papers."""
    if rule == "factored":
        l_A, l_G = (damping * largest(A), damping * largest(G)) if relative else (damping, damping)
        return inverse(G, l_G) @ J @ inverse(A, l_A)
    total = damping * largest(A) * largest(G) if relative else torch.tensor(damping, dtype=J.dtype)
    if rule == "product":
        F = torch.kron(G, A) + total * torch.eye(J.numel(), dtype=J.dtype)
        return torch.linalg.solve(F, J.flatten()).reshape(J.shape)
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    return inverse(G, total.sqrt() / pi) @ J @ inverse(A, pi * total.sqrt())


def gradient(module: nn.Module) -> Tensor:
    """(groups, d_out, d_in[+1]) by hand."""
    groups = getattr(module, "groups", 1)
    weight = module.weight.grad
    J = weight.mT[None] if isinstance(module, nn.Embedding) else weight.reshape(groups, weight.shape[0] // groups, -1)
    bias = getattr(module, "bias", None)
    return J if bias is None else torch.cat([J, bias.grad.reshape(groups, -1, 1)], dim=-1)


def made(optimizer: rkfac.KFAC, name: str) -> Direction:
    """The direction of a layer's present gradient."""
    block = block_of(optimizer, name)
    return block.direction(tuple(p.grad for p in block.parameters), optimizer.param_groups[0])


def curved(optimizer: rkfac.KFAC, name: str, change: tuple[Tensor, ...]) -> Tensor:
    """change^T (F + damping) change."""
    product = block_of(optimizer, name).multiply(change, optimizer.param_groups[0])
    return sum((d * c).sum() for d, c in zip(change, product, strict=True))


def applied(optimizer: rkfac.KFAC, name: str) -> tuple[Tensor, ...]:
    """S as the optimizer applies it, one tensor of the parameter's shape each."""
    parts = tuple(torch.zeros_like(p).detach() for p in block_of(optimizer, name).parameters)
    direction = made(optimizer, name)
    for index, part in enumerate(parts):
        gradient = block_of(optimizer, name).parameters[index].grad
        direction.add_to(index, part, 1.0, [(gradient, 1.0)])
    return parts


def as_parameters(module: nn.Module, S: Tensor) -> tuple[Tensor, ...]:
    """(groups, d_out, d_in[+1]) back to weight and bias."""
    if isinstance(module, nn.Embedding):
        return (S[0].mT,)
    if getattr(module, "bias", None) is None:
        return (S.reshape(module.weight.shape),)
    return S[..., :-1].reshape(module.weight.shape), S[..., -1].reshape(-1)


@each_problem
@each_rule
@each_measure
def test_every_layer_equals_the_dense_formula(problem: Problem, rule: str, relative: bool) -> None:
    optimizer = statistics(problem, damping_rule=rule, relative_to="largest" if relative else None, damping=DAMPING)
    for name in weight_layers(problem.model()):
        block = block_of(optimizer, name)
        J = gradient(block.module)
        A, G = held(optimizer, name)
        S = torch.stack([dense(rule, relative, J[k], A[k], G[k]) for k in range(len(J))])
        for got, expected in zip(applied(optimizer, name), as_parameters(block.module, S), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
        direction = made(optimizer, name)
        torch.testing.assert_close(
            torch.as_tensor(direction.norm, dtype=torch.float64), S.norm(), rtol=1e-8, atol=1e-10
        )
        torch.testing.assert_close(
            torch.as_tensor(direction.inner, dtype=torch.float64), (S * J).sum(), rtol=1e-8, atol=1e-10
        )


@each_problem
@each_rule
@each_measure
def test_the_damped_curvature_undoes_the_direction(problem: Problem, rule: str, relative: bool) -> None:
    """S^T (F + l) S = <S, J> when S = (F + l)^-1 J."""
    optimizer = statistics(problem, damping_rule=rule, relative_to="largest" if relative else None, damping=DAMPING)
    for name in weight_layers(problem.model()):
        got = curved(optimizer, name, applied(optimizer, name))
        torch.testing.assert_close(
            got, torch.as_tensor(made(optimizer, name).inner, dtype=torch.float64), rtol=1e-8, atol=1e-10
        )


@each_rule
def test_the_damping_in_force_follows_the_group_between_refreshes(rule: str) -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Linear(4, 3)), (6, 4))
    optimizer = statistics(problem, damping_rule=rule, damping=DAMPING)
    module = block_of(optimizer, "0").module
    A, G = held(optimizer, "0")
    for damping in (0.5, 0.01):
        optimizer.param_groups[0]["damping"] = damping
        S = dense(rule, True, gradient(module)[0], A[0], G[0], damping)
        for got, expected in zip(applied(optimizer, "0"), as_parameters(module, S[None]), strict=True):
            torch.testing.assert_close(got, expected)


@each_rule
def test_a_grouped_convolution_is_several_independent_ones(rule: str) -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh()).double()
    x = torch.randn(5, 4, 3, 4, dtype=torch.float64)
    optimizer = kfac(grouped, damping_rule=rule, damping=DAMPING)
    losses(grouped(x)).mean().backward()
    optimizer.step()
    weight, bias = applied(optimizer, "0")
    for k in range(2):
        alone = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh()).double()
        with torch.no_grad():
            alone[0].weight.copy_(grouped[0].weight[3 * k : 3 * k + 3])
            alone[0].bias.copy_(grouped[0].bias[3 * k : 3 * k + 3])
        single = kfac(alone, damping_rule=rule, damping=DAMPING)
        losses(alone(x[:, 2 * k : 2 * k + 2])).mean().backward()
        single.step()
        expected = applied(single, "0")
        torch.testing.assert_close(weight[3 * k : 3 * k + 3], expected[0])
        torch.testing.assert_close(bias[3 * k : 3 * k + 3], expected[1])


@each_rule
def test_a_channels_last_weight_gets_the_same_direction(rule: str) -> None:
    problem = Problem("", lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh()), (4, 2, 5, 5))
    reference, model = statistics(problem, damping_rule=rule), problem.model().to(memory_format=torch.channels_last)
    optimizer = kfac(model, damping_rule=rule)
    losses(model(problem.x().contiguous(memory_format=torch.channels_last))).mean().backward()
    optimizer.step()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for got, expected in zip(applied(optimizer, "0"), applied(reference, "0"), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_step_moves_parameters_by_minus_lr_times_the_direction(rule: str, momentum: float) -> None:
    problem = Problem(
        "", lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)), (4, 2, 4, 4)
    )
    model = problem.model()
    optimizer = kfac(model, lr=0.3, momentum=momentum, damping_rule=rule, damping=DAMPING)
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses(model(problem.x())).mean().backward()
    optimizer.step()
    for name, module in weight_layers(model).items():
        J = gradient(module)
        A, G = held(optimizer, name)
        S = torch.stack([dense(rule, True, J[k], A[k], G[k]) for k in range(len(J))])
        for key, s in zip(("weight", "bias"), as_parameters(module, S), strict=True):
            torch.testing.assert_close(getattr(module, key).detach(), before[f"{name}.{key}"] - 0.3 * s)


def test_an_embedding_keeps_the_diagonal_of_its_last_refresh() -> None:
    """As every other factor does: statistics between refreshes, or a resume, must not change what is applied."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh()).double()
    optimizer = kfac(model, inverse_every=10, damping=DAMPING)

    def step(indices: list[int]) -> None:
        optimizer.zero_grad()
        losses(model(torch.tensor(indices))).mean().backward()
        optimizer.step()

    step([0, 1, 1, 2])
    A, G = (t.clone() for t in held(optimizer, "0"))
    step([0, 0, 0, 3])
    assert not torch.equal(held(optimizer, "0")[0], A)
    expected = dense("factored", True, gradient(model[0])[0], A[0], G[0]).mT
    torch.testing.assert_close(applied(optimizer, "0")[0], expected)
    optimizer.param_groups[0]["damping"] = 0.5
    again = dense("factored", True, gradient(model[0])[0], A[0], G[0], 0.5).mT
    torch.testing.assert_close(applied(optimizer, "0")[0], again)
    optimizer.param_groups[0]["damping"] = DAMPING
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(applied(optimizer, "0")[0], expected)


# --- norms

NORMS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.BatchNorm2d(3), (6, 3, 2, 2)),
    (nn.GroupNorm(2, 4), (6, 4, 3)),
    (nn.LayerNorm((2, 3)), (6, 2, 3)),
    (nn.LayerNorm(3, bias=False), (6, 2, 3)),
    (nn.RMSNorm(4), (6, 4)),
]


@pytest.mark.parametrize("norm, shape", NORMS, ids=[type(n).__name__ for n, _ in NORMS])
@each_measure
def test_unit_blocks_are_small_solves_and_a_full_fisher_without_cross_unit_entries(
    norm: nn.Module, shape: Any, relative: bool
) -> None:
    model = nn.Sequential(norm, nn.Tanh()).double()
    x = torch.randn(shape, dtype=torch.float64)
    optimizer = kfac(model, relative_to="largest" if relative else None, damping=DAMPING)
    optimizer.zero_grad()
    losses(model(x)).mean().backward()
    optimizer.step()
    (blocks,) = (factor.dense() for factor in block_of(optimizer, "0").factors.values())
    units, k = blocks.shape[:2]
    gradients = torch.stack([p.grad.flatten() for p in norm.parameters()], dim=-1)
    l = DAMPING * max(largest(F) for F in blocks) if relative else DAMPING
    S = torch.stack(
        [torch.linalg.solve(blocks[u] + l * torch.eye(k, dtype=x.dtype), gradients[u]) for u in range(units)]
    )
    got = applied(optimizer, "0")
    for i, part in enumerate(got):
        torch.testing.assert_close(part.flatten(), S[:, i])
    full = torch.block_diag(*blocks)  # over (unit, scale or shift): all entries between two units are zero
    dense_S = torch.linalg.solve(full + l * torch.eye(len(full), dtype=x.dtype), gradients.flatten())
    torch.testing.assert_close(torch.stack([t.flatten() for t in got], dim=-1).flatten(), dense_S)
    assert torch.linalg.eigvalsh(blocks + l * torch.eye(k, dtype=x.dtype)).min() >= l * (1 - 1e-9)  # positive definite
    direction = made(optimizer, "0")
    torch.testing.assert_close(torch.as_tensor(direction.norm, dtype=torch.float64), S.norm())
    torch.testing.assert_close(torch.as_tensor(direction.inner, dtype=torch.float64), (S * gradients).sum())
    assert direction.inner > 0
    torch.testing.assert_close(curved(optimizer, "0", got), torch.as_tensor(direction.inner, dtype=torch.float64))


# --- layers that see nothing


@each_rule
def test_a_dead_layer_keeps_a_finite_direction(rule: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)  # no unit fires: the first layer's gradients and the second's inputs vanish
    optimizer = kfac(model, damping_rule=rule)
    losses(model(torch.randn(6, 4, dtype=torch.float64))).mean().backward()
    optimizer.step()
    for part in applied(optimizer, "0"):
        assert torch.equal(part, torch.zeros_like(part))
    for part in applied(optimizer, "2"):
        assert torch.isfinite(part).all()


@each_rule
def test_damping_to_infinity_gives_the_gradient_direction(rule: str) -> None:
    problem = Problem(
        "", lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), (4, 2, 3, 3)
    )
    optimizer = statistics(problem, damping_rule=rule, relative_to=None, damping=1e12)
    for name, block in optimizer._blocks.items():
        got = torch.cat([t.flatten() for t in applied(optimizer, name)])
        plain = torch.cat([p.grad.flatten() for p in block.parameters])
        torch.testing.assert_close(got / got.norm(), plain / plain.norm(), rtol=1e-4, atol=1e-5)

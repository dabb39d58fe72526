"""Against curvlinops' K-FAC, and against the exact GGN where theory says that K-FAC is exact.

Expectations over the model's own targets are enumerated, not sampled (`Enumerated`), so equalities are equalities.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature.brute import (
    Mean,
    block_matrix,
    exact_fisher,
    generalized_gauss_newton,
    held,
    identity,
    kfac,
    softmax_fisher,
    weight_layers,
)


class Tokens(nn.Module):
    """Logits for every position, (n, classes, positions) as nn.CrossEntropyLoss wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mT


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Tanh(), nn.Linear(3, 5, bias=bias))


def pooled(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Tanh(), Mean(1), nn.Linear(3, 5, bias=bias))


def cnn(bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(3, 2, (2, 1), dilation=(1, 2), bias=bias),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(5, bias=bias),
    )


def oracle(model: nn.Module, x: Tensor, y: Tensor, name: str, **keywords: Any) -> Tensor:
    """curvlinops' K-FAC of one layer's (weight, bias), as a dense matrix."""
    curvlinops = pytest.importorskip("curvlinops")
    model = copy.deepcopy(model)
    parameters = list(model.get_submodule(name).parameters())
    loss = nn.CrossEntropyLoss()
    operator = curvlinops.KFACLinearOperator(
        model, loss, parameters, [(x, y)], check_deterministic=False, separate_weight_and_bias=False, **keywords
    )
    return operator @ torch.eye(operator.shape[1], dtype=x.dtype)


PROBLEMS = {"mlp": (mlp, (6, 4)), "pooled": (pooled, (6, 5, 4)), "cnn": (cnn, (4, 2, 6, 5))}
each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@each_sharing
def test_empirical_factors_have_the_product_of_curvlinops(problem: str, bias: bool, sharing: str) -> None:
    build, shape = PROBLEMS[problem]
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(0, 5, shape[:1])
    model = build(bias).double()
    model(x)  # lazy layers learn their shape
    optimizer = kfac(model, weight_sharing=sharing)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name in weight_layers(model):
        expected = oracle(model, x, y, name, fisher_type="empirical", kfac_approx=sharing)
        torch.testing.assert_close(block_matrix(optimizer, name), expected)


@each_sharing
def test_token_losses_have_the_product_of_curvlinops(sharing: str) -> None:
    x, y = torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(0, 5, (6, 7))
    model = Tokens().double()
    optimizer = kfac(model, weight_sharing=sharing, loss_average="tokens")
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name in weight_layers(model):
        expected = oracle(model, x, y, name, fisher_type="empirical", kfac_approx=sharing)
        torch.testing.assert_close(block_matrix(optimizer, name), expected)


@pytest.mark.parametrize("problem", PROBLEMS)
@each_sharing
def test_expected_factors_have_the_product_of_curvlinops_type_2(problem: str, sharing: str) -> None:
    build, shape = PROBLEMS[problem]
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(0, 5, shape[:1])
    model = build().double()
    model(x)
    optimizer = exact_fisher(model, x, "categorical", weight_sharing=sharing)
    for name in weight_layers(model):
        expected = oracle(model, x, y, name, fisher_type="type-2", kfac_approx=sharing)
        torch.testing.assert_close(block_matrix(optimizer, name), expected)


# --- where K-FAC is exact


def linear_net(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), *between, nn.Linear(3, 5), nn.Linear(5, 2))


def gap(model: nn.Module, x: Tensor, kind: str, **keywords: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """(K-FAC, exact GGN) of every layer."""
    model = model.double()
    optimizer = exact_fisher(model, x, kind, **keywords)
    hessian = softmax_fisher if kind == "categorical" else identity
    return {
        name: (block_matrix(optimizer, name), generalized_gauss_newton(model, name, x, hessian))
        for name in weight_layers(model)
    }


def check(blocks: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert blocks
    for got, expected in blocks.values():
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@each_sharing
def test_exact_for_deep_linear_nets_with_squared_error(sharing: str) -> None:
    """The Jacobian behind a layer is the same for every sample, so E[aa^T (x) gg^T] factorises on any batch."""
    check(gap(linear_net(), torch.randn(7, 4, dtype=torch.float64), "gaussian", weight_sharing=sharing))


def test_expand_is_exact_for_linear_nets_with_a_loss_at_every_position() -> None:
    check(gap(linear_net(), torch.randn(3, 4, 4, dtype=torch.float64), "gaussian", weight_sharing="expand"))


def test_expand_is_exact_for_pointwise_convolutions_with_a_loss_at_every_pixel() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1))
    check(gap(model, torch.randn(3, 3, 2, 2, dtype=torch.float64), "gaussian", weight_sharing="expand"))


def test_reduce_is_exact_for_linear_nets_that_average_positions() -> None:
    check(gap(linear_net(Mean(1)), torch.randn(6, 4, 4, dtype=torch.float64), "gaussian", weight_sharing="reduce"))


def test_reduce_is_exact_for_a_linear_convolution_with_global_pooling() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2, padding=1), Mean(2, 3), nn.Linear(3, 2))
    check(gap(model, torch.randn(5, 2, 4, 4, dtype=torch.float64), "gaussian", weight_sharing="reduce"))


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("samples", [1, 4], ids=["one sample", "identical samples"])
def test_exact_for_one_sample_or_identical_ones_whatever_the_net(kind: str, samples: int) -> None:
    x = torch.randn(1, 4, dtype=torch.float64).repeat(samples, 1)
    check(gap(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)), x, kind))


def test_not_exact_elsewhere() -> None:
    """The equalities above are no accident of the tests: without their premises they fail."""
    x = torch.randn(6, 4, 4, dtype=torch.float64)
    tanh = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5))
    for blocks in (
        gap(tanh, x[:, 0], "gaussian"),
        gap(linear_net(), x[:, 0], "categorical"),
        gap(linear_net(Mean(1)), x, "gaussian", weight_sharing="expand"),
    ):
        got, expected = blocks["0"]
        assert (got - expected).norm() > 1e-3 * expected.norm()


def test_many_draws_approach_the_exact_fisher() -> None:
    """fisher="mc" itself: a batch of identical samples is as many draws. Within 5 standard errors, entry by entry."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    draws = 40_000
    x = torch.randn(1, 4, dtype=torch.float64)
    exact = exact_fisher(copy.deepcopy(model), x, "categorical")
    y = [model[0](x).detach().requires_grad_()]
    y.append(model[2](torch.tanh(y[0])))
    p = y[1].softmax(-1).detach()[0]
    columns = p - torch.eye(5, dtype=torch.float64)  # the gradient at the output for each class
    gradients = [
        torch.stack([torch.autograd.grad(y[1], t, c[None], retain_graph=True)[0][0] for c in columns]) for t in y
    ]
    sampled = kfac(model, fisher="mc", likelihood="categorical", seed=3)
    model(x.expand(draws, 4)).sum().backward()
    sampled.step()
    for name, g in zip(("0", "2"), gradients, strict=True):
        products = g[:, :, None] * g[:, None, :]
        G = torch.einsum("k,kij->ij", p, products)
        torch.testing.assert_close(held(exact, name)[1][0], G)
        error = ((torch.einsum("k,kij->ij", p, products.square()) - G.square()) / draws).sqrt()
        assert ((held(sampled, name)[1][0] - G).abs() <= 5 * error + 1e-12).all()
        torch.testing.assert_close(held(sampled, name)[0], held(exact, name)[0])

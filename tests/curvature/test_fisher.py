"""Each likelihood draws gradients with mean zero whose second moment is the exact Fisher of the output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.brute import held, kfac
from rkfac import Bernoulli, Categorical, Gaussian

DRAWS = 200_000
LOGITS = torch.tensor([0.3, -1.0, 1.5, 0.0], dtype=torch.float64)


def drawn(likelihood: Categorical | Bernoulli | Gaussian, generator: torch.Generator) -> Tensor:
    return likelihood.draw_gradient(LOGITS.expand(DRAWS, -1), generator)


def check_moments(g: Tensor, fisher: Tensor) -> None:
    """Sample mean and second moment within five standard errors, both measured on the sample itself."""
    mean_error = 5 * g.std(0) / DRAWS**0.5
    assert (g.mean(0).abs() <= mean_error).all()
    products = g[:, :, None] * g[:, None, :]
    error = 5 * products.std(0) / DRAWS**0.5 + 1e-12
    assert ((products.mean(0) - fisher).abs() <= error).all()


def test_categorical_draws_have_the_exact_moments(generator: torch.Generator) -> None:
    p = LOGITS.softmax(-1)
    g = drawn(Categorical(), generator)
    check_moments(g, torch.diag(p) - torch.outer(p, p))
    labels = g.argmin(-1)  # p - onehot is negative at the drawn class alone
    torch.testing.assert_close(g, p - F.one_hot(labels, 4))
    # Its support is exact, so enumerating the classes gives the Fisher without noise; frequencies are binomial.
    frequency = torch.bincount(labels, minlength=4) / DRAWS
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / DRAWS).sqrt()).all()
    every = p - torch.eye(4, dtype=p.dtype)
    torch.testing.assert_close(torch.einsum("k,ki,kj->ij", p, every, every), torch.diag(p) - torch.outer(p, p))


def test_bernoulli_draws_have_the_exact_moments(generator: torch.Generator) -> None:
    p = LOGITS.sigmoid()
    g = drawn(Bernoulli(), generator)
    check_moments(g, torch.diag(p * (1 - p)))
    torch.testing.assert_close(g, p - (g < 0).double())


def test_gaussian_draws_have_the_exact_moments(generator: torch.Generator) -> None:
    check_moments(drawn(Gaussian(), generator), torch.eye(4, dtype=torch.float64))


def test_gradients_are_those_of_torchs_losses_at_the_drawn_targets(generator: torch.Generator) -> None:
    output = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    g = Categorical().draw_gradient(output.detach(), generator)
    (expected,) = torch.autograd.grad(F.cross_entropy(output, g.argmin(-1), reduction="sum"), output)
    torch.testing.assert_close(g, expected)
    g = Bernoulli().draw_gradient(output.detach(), generator)
    bits = (g < 0).double()
    assert 0 < bits.mean() < 1
    (expected,) = torch.autograd.grad(F.binary_cross_entropy_with_logits(output, bits, reduction="sum"), output)
    torch.testing.assert_close(g, expected)
    g = Gaussian().draw_gradient(output.detach(), generator)
    target = (output - g).detach()
    (expected,) = torch.autograd.grad(F.mse_loss(output, target, reduction="sum") / 2, output)
    torch.testing.assert_close(g, expected)


@pytest.mark.parametrize(
    "class_dim, shape", [(1, (3, 4, 5, 2)), (-1, (3, 5, 4)), (2, (3, 5, 4)), (0, (4, 3)), (None, (3, 4)), (None, (4,))]
)
def test_classes_may_be_anywhere(class_dim: int | None, shape: tuple[int, ...], generator: torch.Generator) -> None:
    output = torch.randn(shape, dtype=torch.float64)
    likelihood = Categorical(class_dim)
    g = likelihood.draw_gradient(output, generator)
    assert g.shape == output.shape
    at = -1 if class_dim is None else class_dim
    rows, p = g.movedim(at, -1).reshape(-1, 4), output.movedim(at, -1).softmax(-1).reshape(-1, 4)
    torch.testing.assert_close(rows, p - F.one_hot(rows.argmin(-1), 4))
    assert likelihood.terms(output) == len(rows)


def test_an_ambiguous_shape_is_refused(generator: torch.Generator) -> None:
    output = torch.zeros(3, 4, 5)
    for call in (lambda: Categorical().draw_gradient(output, generator), lambda: Categorical().terms(output)):
        with pytest.raises(ValueError, match="class_dim"):
            call()


def test_a_model_with_an_ambiguous_output_is_refused_by_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    kept = kfac(model, fisher="mc")
    model(torch.zeros(2, 5, 4)).sum().backward()  # hooks are no place to raise
    with pytest.raises(ValueError, match="class_dim"):
        kept.step()


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
def test_terms_are_samples_where_a_samples_outputs_belong_together(likelihood: Gaussian | Bernoulli) -> None:
    assert likelihood.terms(torch.zeros(3, 4, 5)) == 3


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_draws_are_made_in_full_precision_and_repeat_with_the_seed(
    likelihood: Categorical | Gaussian | Bernoulli, dtype: torch.dtype
) -> None:
    output = torch.randn(6, 4).to(dtype)
    first, second = (likelihood.draw_gradient(output, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(first, second)


def test_terms_set_the_scale_of_token_predictions() -> None:
    """With a class at every position the Fisher is that of one prediction: G of the last layer = mean g g^T."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    source = torch.Generator().manual_seed(7)
    optimizer = kfac(model, fisher="mc", likelihood=Categorical(class_dim=-1), generator=source)
    output = model(x)
    g = Categorical(class_dim=-1).draw_gradient(output.detach(), torch.Generator().manual_seed(7)).reshape(-1, 3)
    output.sum().backward()
    optimizer.step()
    A, G = held(optimizer, "0")
    torch.testing.assert_close(G[0], g.mT @ g / 30)
    a = torch.cat([x.reshape(-1, 4), torch.ones(30, 1, dtype=x.dtype)], 1)
    torch.testing.assert_close(A[0], a.mT @ a / 30)

"""A model whose curvature was fitted is left as it was, and nobody who watches it notices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from operators.test_fitting import classified, matrix, mlp


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "trained": [p.requires_grad for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "on weights": [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        "random": torch.get_rng_state(),
    }


def same(before: Any, after: Any) -> None:
    torch.testing.assert_close(before, after, rtol=0, atol=0, check_dtype=True)


class Awkward(nn.Module):
    """Batch norms, dropout, random numbers, and a buffer that counts calls in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5))
        self.register_buffer("calls", torch.zeros(()))
        self.body[4].bias.requires_grad_(False)
        self.body[2].eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) + 1e-3 * torch.randn(5)


@pytest.mark.parametrize("fails", [False, True], ids=["done", "interrupted"])
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
def test_the_model_is_left_as_it_was(fisher: Any, fails: bool) -> None:
    model = Awkward()
    x, y = torch.randn(12, 4), torch.randint(0, 5, (12,))
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters()]
    before = state(model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and len(target) < 12:
            raise ZeroDivisionError
        return F.cross_entropy(output, target)

    if fails:
        with pytest.raises(ZeroDivisionError):
            rkfac.fit_curvature(model, [(x, y), (x[:2], y[:2])], loss, fisher=fisher)
    else:
        found = rkfac.fit_curvature(model, [(x, y)], loss, fisher=fisher)
        assert found.left_out == {"body.4.bias": "it is frozen (requires_grad=False)"}
    same(before, state(model))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_evaluation_mode_is_what_it_sees() -> None:
    model, (x, y) = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 5)).double(), classified()
    training = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy)
    model.eval()
    evaluating = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy)
    for name in training:
        assert torch.equal(matrix(training[name]), matrix(evaluating[name]))


@pytest.mark.parametrize("keywords", [{}, {"apply": "backward", "rank": 2}, {"fisher": "mc"}], ids=str)
def test_an_optimizer_of_the_model_sees_nothing_of_it(keywords: dict[str, Any]) -> None:
    """Also between a backward pass and its step, and with statistics due."""

    def losses(fits: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        x, y = torch.randn(6, 4), torch.randint(0, 5, (6,))
        optimizer = rkfac.RSKFAC(model, lr=0.1, factor_every=1, inverse_every=2, **keywords)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            if fits:
                rkfac.fit_curvature(model, [(torch.randn(9, 4) * 7, torch.randint(0, 5, (9,)))], F.cross_entropy)
            optimizer.step()
            found.append(value.item())
        return found

    assert losses(False) == losses(True)


def test_works_where_gradients_are_off_and_on_compiled_models() -> None:
    model, (x, y) = mlp(), classified()
    plain = rkfac.fit_curvature(model, [(x, y)], F.cross_entropy)
    with torch.no_grad():
        found = rkfac.fit_curvature(torch.compile(copy.deepcopy(model), backend="eager"), [(x, y)], F.cross_entropy)
    for name in plain:
        torch.testing.assert_close(matrix(found[name]), matrix(plain[name]))

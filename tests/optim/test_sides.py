"""Half a method: one of a layer's two factors alone, the identity in the other's place."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.test_trajectory import assert_follows, batches, in_numpys_words, network, weights_and_biases
from oracles import numpy_kfac

SIDES = ["input", "output"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(9, 7, dtype=torch.float64), torch.randint(0, 5, (9,))


def first_factors(net: nn.Sequential) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A, G and the gradient [J | j] of each Linear layer, by hand."""
    x, y = batch()
    first, last = net[0], net[2]
    h = first(x)
    z = torch.tanh(h)
    out = last(z)
    h.retain_grad(), out.retain_grad()
    F.cross_entropy(out, y).backward()
    found = []
    for layer, a, g in ((first, x, h.grad), (last, z.detach(), out.grad)):
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
        J = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        found.append((a.mT @ a / len(a), len(a) * g.mT @ g, J))
    return found


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("relative_to", ["mean", None])
def test_a_step_is_the_one_sided_solve(side: str, rule: str, relative_to: str | None) -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    expected = []
    for A, G, J in first_factors(copy.deepcopy(net)):
        X = A if side == "input" else G
        size = X.diagonal().mean() if relative_to else 1.0
        inverse = torch.linalg.inv(X + 0.3 * size * torch.eye(len(X), dtype=X.dtype))
        expected.append(J @ inverse if side == "input" else inverse @ J)
    optimizer = stated.KFAC(
        net, lr=0.1, momentum=0, graft=None, sides=side, damping=0.3, relative_to=relative_to, damping_rule=rule
    )
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    moved = [(b - p.detach()) / 0.1 for b, p in zip(before, net.parameters(), strict=True)]
    for S, W, b in zip(expected, moved[::2], moved[1::2], strict=True):
        torch.testing.assert_close(torch.cat([W, b[:, None]], 1), S)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("method", ["exact", "rsvd"])
@pytest.mark.parametrize("rule", ["factored", "product"])
def test_thirty_steps_agree_with_numpy(side: str, method: str, rule: str) -> None:
    net, data = network(), batches()
    keywords = {**rkfac.paper_defaults(), "damping_rule": rule, "factor_every": 2, "inverse_every": 6}
    keywords |= {"rank": 5, "oversampling": 2, "weight_decay": 0.0}
    kind = rkfac.KFAC if method == "exact" else rkfac.RSKFAC
    optimizer = kind(net, sides=side, **keywords, generator=torch.Generator().manual_seed(5))
    source = torch.Generator().manual_seed(5)
    history, losses = numpy_kfac.train(
        weights_and_biases(net),
        data,
        method=method,
        sides=side,
        damping_rule="factor" if rule == "factored" else "product",
        draw=lambda d, p: torch.randn(d, p, dtype=torch.float64, generator=source).numpy(),
        **in_numpys_words(keywords, "inverse_every", "oversampling", "power_iterations"),
        weight_decay=0.0,
    )
    assert_follows(net, optimizer, data, history, losses)


def test_the_input_side_collects_no_gradients() -> None:
    net = model()
    optimizer = stated.RSKFAC(net, sides="input", rank=3, oversampling=1)
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    for block in optimizer._blocks.values():
        of_inputs, of_gradients = block.pending.moments
        assert not of_inputs.empty
        assert of_gradients.empty
    optimizer.step()
    report = optimizer.report()[0]
    assert report.rank_input == 3
    assert report.rank_output is None
    assert report.damping_output == 0.0


@pytest.mark.parametrize("side", SIDES)
def test_a_state_of_one_side_is_not_loaded_by_another(side: str) -> None:
    state = stated.KFAC(model(), sides=side).state_dict()
    with pytest.raises(ValueError, match="sides"):
        stated.KFAC(model()).load_state_dict(state)


def test_an_unknown_side_is_refused() -> None:
    with pytest.raises(ValueError, match="sides"):
        rkfac.KFAC(model(), sides="left")

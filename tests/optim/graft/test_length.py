"""A layer's step is as long as torch's, whatever its direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import stated
from optim.graft.by_hand import RULES, Watched, cosine, joined, name_of
from optim.problems import assert_moved, convnet, images, mlp, parameters, reader, rows, sentences, step

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2, "damping": 0.05, "relative_to": "mean"}
SKETCHED: dict[str, Any] = {**EVERY, "rank": 3, "oversampling": 1, "tail": "trace"}
each_rule = pytest.mark.parametrize("rule", RULES, ids=name_of)


@each_rule
@pytest.mark.parametrize("kind", ["KFAC", "RSKFAC"])
@pytest.mark.parametrize("case", ["images", "text"])
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["float64", "float32"])
def test_every_layer_moves_by_the_length_of_the_plain_rule(
    rule: Any, kind: str, case: str, dtype: torch.dtype, close: float
) -> None:
    graft, numbers = rule
    model = (convnet if case == "images" else reader)(dtype=dtype)
    optimizer = getattr(stated, kind)(model, lr=0.1, graft=graft, **numbers, **(EVERY if kind == "KFAC" else SKETCHED))
    watched = Watched(model, optimizer, graft, numbers)
    turned = 0
    for _ in range(6):
        x, y = images() if case == "images" else sentences()
        watched.step((x.to(dtype) if case == "images" else x, y), 0.1)
        layers = watched.layers()
        assert len(layers) == 4
        for layer, names in layers.items():
            moved, plain = joined(watched.moved, names), joined(watched.plain, names)
            assert float(moved.norm()) == pytest.approx(float(plain.norm()), rel=close), layer
            turned += cosine(moved, plain) < 0.95
    assert turned >= 6, "nothing was preconditioned: every length is right by itself"
    if case == "text":  # no block covers it
        torch.testing.assert_close(watched.moved["scale"], watched.plain["scale"], rtol=100 * close, atol=close)


@pytest.mark.parametrize("nesterov", [False, True])
def test_constant_gradients_are_added_up_as_in_sgd_and_no_more(nesterov: bool) -> None:
    """Directions of K-FAC would agree with one another all the same; what must not grow is the length."""
    model, lr, momentum = mlp(), 0.01, 0.9
    settings = {**EVERY, "factor_every": 1000, "inverse_every": 1000}
    optimizer = stated.KFAC(model, lr=lr, momentum=momentum, nesterov=nesterov, **settings)
    step(model, optimizer, rows())
    held = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"].zero_()
    shadow = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    sgd = torch.optim.SGD(shadow, lr=lr, momentum=momentum, nesterov=nesterov)
    for _ in range(12):
        before, plain_before = parameters(model), [p.detach().clone() for p in shadow]
        for p, q, g in zip(model.parameters(), shadow, held, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        sgd.step()
        moved = [before[name] - p for name, p in parameters(model).items()]
        plain = [a - b.detach() for a, b in zip(plain_before, shadow, strict=True)]
        for layer in range(3):
            mine = torch.cat([t.flatten() for t in moved[2 * layer : 2 * layer + 2]])
            theirs = torch.cat([t.flatten() for t in plain[2 * layer : 2 * layer + 2]])
            assert float(mine.norm()) == pytest.approx(float(theirs.norm()), rel=1e-9)
            assert cosine(mine, theirs) < 0.99


@pytest.mark.parametrize("graft", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_the_rms_clip_holds_the_grafted_step(graft: Any, clip: float) -> None:
    model, lr = convnet(), 0.1
    optimizer = stated.KFAC(model, lr=lr, graft=graft, **{**EVERY, "update_clip": clip})
    watched = Watched(model, optimizer, graft, {})
    for _ in range(3):
        watched.step(images(), lr)
        for layer, names in watched.layers().items():
            moved, plain = joined(watched.moved, names), joined(watched.plain, names)
            rms = float(plain.square().mean().sqrt())
            assert float(moved.square().mean().sqrt()) == pytest.approx(min(rms, clip), rel=1e-8), layer


@pytest.mark.parametrize("scale", [1e-30, 1e25])
@pytest.mark.parametrize("case", ["images", "text"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_gradients_of_any_size_give_sgds_length_in_float32(scale: float, case: str, nesterov: bool) -> None:
    numbers = {"momentum": 0.9, "nesterov": nesterov}
    model = (convnet if case == "images" else reader)(dtype=torch.float32)
    lr = 0.1 / scale
    optimizer = stated.RSKFAC(model, lr=lr, **numbers, **SKETCHED)
    watched = Watched(model, optimizer, "sgd", numbers)
    for _ in range(3):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        x, y = images(dtype=torch.float32) if case == "images" else sentences()
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(scale, rel=0.99)
        optimizer.step()
        watched.observe(before, lr)
        for layer, names in watched.layers().items():
            plain = float(joined(watched.plain, names).norm())
            assert plain > 0
            assert float(joined(watched.moved, names).norm()) == pytest.approx(plain, rel=1e-3), layer


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e12])
def test_gradients_of_any_size_give_adamws_length_in_float32(scale: float) -> None:
    """Far below its eps AdamW's step is the first moment over eps: their squares are nothing in float32."""
    model, lr = convnet(dtype=torch.float32), 0.1 * max(1.0, 1e-8 / scale)
    optimizer = stated.RSKFAC(model, lr=lr, graft="adamw", **SKETCHED)
    watched = Watched(model, optimizer, "adamw", {})
    for _ in range(3):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        x, y = images(dtype=torch.float32)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        optimizer.step()
        watched.observe(before, lr)
        for layer, names in watched.layers().items():
            moved, plain = joined(watched.moved, names), joined(watched.plain, names)
            assert float(moved.norm()) == pytest.approx(float(plain.norm()), rel=1e-3), layer


def test_a_square_that_no_float32_holds_is_refused_by_name() -> None:
    """torch's AdamW stands still from then on, without a word."""
    model = convnet(dtype=torch.float32)
    optimizer = stated.RSKFAC(model, lr=0.1, graft="adamw", **SKETCHED)
    step(model, optimizer, images(dtype=torch.float32))
    x, y = images(dtype=torch.float32)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[3].weight.grad.mul_(1e25)
    start = parameters(model)
    with pytest.warns(UserWarning, match="left out for '3'"):
        optimizer.step()
    stayed = {name for name, value in parameters(model).items() if torch.equal(value, start[name])}
    assert stayed == {"3.weight", "3.bias"}
    assert all(value.isfinite().all() for p in model.parameters() for value in (optimizer.state[p]["exp_avg_sq"],))
    step(model, optimizer, images(dtype=torch.float32))
    assert_moved(model, start)


def test_a_bias_without_a_group_takes_no_share_of_the_length() -> None:
    """It is part of what is solved, but the weight alone moves: as far as SGD would move it."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 4).double()
    optimizer = stated.KFAC(layer, lr=0.1, momentum=0.0, params=[layer.weight], graft="sgd")
    before, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    F.cross_entropy(layer(torch.randn(8, 5, dtype=torch.float64)), torch.randint(4, (8,))).backward()
    assert layer.weight.grad is not None
    optimizer.step()
    moved = torch.linalg.norm(layer.weight.detach() - before)
    torch.testing.assert_close(moved, 0.1 * torch.linalg.norm(layer.weight.grad))
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("shape, rank, batch", [((2520, 10), 64, 8), ((10, 3000), 16, 8), ((2520, 4), 4, 4)])
def test_a_layer_with_one_narrow_side_has_sgds_length_in_float32(shape: tuple[int, int], rank: int, batch: int) -> None:
    """One side is kept whole, the other cut: there the length was a difference of large numbers."""
    torch.manual_seed(0)
    layer = nn.Linear(*shape)
    optimizer = stated.RSKFAC(
        layer, lr=1.0, momentum=0.0, rank=rank, damping=0.3, relative_to="mean", tail="trace", factor_every=1
    )
    for _ in range(4):
        before = layer.weight.detach().double().clone(), layer.bias.detach().double().clone()
        optimizer.zero_grad()
        target = torch.randn(batch, shape[1]) * torch.logspace(0, -2, shape[1])
        (100 * F.mse_loss(layer(torch.randn(batch, shape[0]) * torch.logspace(0, -3, shape[0])), target)).backward()
        optimizer.step()
        moved = [(a - b.detach().double()).norm() for a, b in zip(before, (layer.weight, layer.bias), strict=True)]
        plain = [p.grad.double().norm() for p in (layer.weight, layer.bias)]
        assert float(torch.stack(moved).norm()) == pytest.approx(float(torch.stack(plain).norm()), rel=1e-3)


def test_a_bias_without_a_group_takes_no_share_with_momentum_either() -> None:
    """The vector that is asked for its own part must not have been spent on the length of the whole."""
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    optimizer = stated.RSKFAC(
        layer, lr=1.0, momentum=0.9, params=[layer.weight], rank=20, damping=3.0, relative_to="mean", factor_every=1
    )
    buffer = torch.zeros_like(layer.weight)
    for _ in range(4):
        before = layer.weight.detach().double().clone()
        optimizer.zero_grad()
        F.mse_loss(layer(torch.randn(16, 300)), torch.randn(16, 300)).backward()
        buffer.mul_(0.9).add_(layer.weight.grad)
        optimizer.step()
        moved = (before - layer.weight.detach().double()).norm()
        assert float(moved) == pytest.approx(float(buffer.norm()), rel=1e-3)


@pytest.mark.parametrize("graft", ["sgd", None])
@pytest.mark.parametrize("order", [(2, 3, 1, 0), (0, 2, 3, 1), (1, 0, 2, 3)])
def test_any_order_of_a_weights_memory_takes_the_same_steps(order: tuple[int, ...], graft: Any) -> None:
    """As weights loaded from elsewhere have it: no view of such a weight is a matrix."""
    found = []
    for stored in (False, True):
        torch.manual_seed(0)
        model = convnet()
        if stored:
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    back = [order.index(i) for i in range(4)]
                    module.weight.data = module.weight.data.permute(order).contiguous().permute(back)
        optimizer = stated.RSKFAC(model, lr=0.05, momentum=0.9, graft=graft, rank=3, damping=0.1, factor_every=1)
        torch.manual_seed(1)
        for _ in range(3):
            step(model, optimizer, images())
        found.append(parameters(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-11)

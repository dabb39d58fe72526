"""Programs that do odd things around the ordinary step: the factors are those of the ordinary one."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    rows,
    step,
    train,
    twin,
    updates,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}
FISHERS = pytest.mark.parametrize("fisher", ["empirical", "mc"])
Program = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def per_sample_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    held = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (a[None],)), b[None])

    vmap(grad(loss), (None, 0, 0))(held, x, y)
    step(model, optimizer, (x, y))


def hessian_vector(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    weights = list(model.parameters())
    first = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in first), weights)
    step(model, optimizer, (x, y))


def inference_before(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    with torch.inference_mode():
        model(x)
    step(model, optimizer, (x, y))


def failing_forward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    with pytest.raises(RuntimeError):
        model(x[:, :5])
    step(model, optimizer, (x, y))


class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise KeyboardInterrupt


def interrupted_backward(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model[2:](Interrupts.apply(model[:2](x))), y)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def with_create_graph(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward(create_graph=True)
    optimizer.step()


def copies_in_between(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), AveragedModel(model)):
        (100 * other(x).sum()).backward()
    step(model, optimizer, (x, y))


PROGRAMS = [
    per_sample_gradients,
    hessian_vector,
    inference_before,
    failing_forward,
    interrupted_backward,
    by_closure,
    with_create_graph,
    copies_in_between,
]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS)
@FISHERS
def test_the_factors_are_those_of_the_plain_step(program: Program, fisher: str) -> None:
    model = mlp()
    other, (x, y) = twin(model), rows()
    optimizer, reference = (stated.KFAC(m, lr=0.1, fisher=fisher, **EVERY) for m in (model, other))
    program(model, optimizer, x, y)
    if fisher == "mc":
        reference._capture.draws = optimizer.state_dict()["curvature"]["draws"] - 1  # what was left out drew too
    step(other, reference, (x, y))
    assert_same_averages(optimizer, reference)
    assert_same_parameters(model, other)


class Checkpoints(nn.Module):
    def __init__(self, net: nn.Sequential, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def _nested(self, x: Tensor) -> Tensor:
        return checkpoint(self.net[2:4], self.net[:2](x), use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "nested":
            return self.net[4](checkpoint(self._nested, x, use_reentrant=False))
        return self.net[4](checkpoint(self.net[2:4], self.net[:2](x), use_reentrant=self.kind == "reentrant"))


@pytest.mark.parametrize("kind, fisher", [("nested", "empirical"), ("nested", "mc"), ("reentrant", "empirical")])
def test_checkpoints_of_every_kind_collect_once(kind: str, fisher: str) -> None:
    net = mlp()
    model, reference = Checkpoints(net, kind), twin(net)
    optimizer, expected = (stated.KFAC(m, fisher=fisher, **EVERY) for m in (model, reference))
    for batch in (rows() for _ in range(2)):
        step(model, optimizer, batch)
        step(reference, expected, batch)
    assert updates(optimizer) == {2}
    assert_same_parameters(net, reference)


@pytest.mark.parametrize("first, second", [("mc", "empirical"), ("empirical", "mc"), ("mc", "mc")])
def test_two_optimizers_on_one_model_do_not_disturb_each_other(first: str, second: str) -> None:
    model = mlp()
    alone, (x, y) = [twin(model), twin(model)], rows()
    together = [stated.KFAC(model, lr=0.0, fisher=fisher, **EVERY) for fisher in (first, second)]
    apart = [stated.KFAC(m, lr=0.0, fisher=f, **EVERY) for m, f in zip(alone, (first, second), strict=True)]
    F.cross_entropy(model(x), y).backward()
    for both, one, own in zip(together, apart, alone, strict=True):
        both.step()
        step(own, one, (x, y))
        assert_same_averages(both, one)


@pytest.mark.parametrize("draw", [rows, images])
@FISHERS
def test_an_empty_batch_counts_for_nothing(draw: Any, fisher: str) -> None:
    model = mlp() if draw is rows else convnet().eval()
    optimizer = stated.KFAC(model, fisher=fisher, **EVERY)
    x, y = draw()
    model(x[:0]).sum().backward()
    optimizer.step()
    assert updates(optimizer) == {0}
    step(model, optimizer, (x, y))
    assert updates(optimizer) == {1}
    assert not any(record.reason for record in optimizer.report())


@pytest.mark.parametrize("start, goal", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_model_that_changes_its_precision_trains_on(start: torch.dtype, goal: torch.dtype) -> None:
    model = mlp(dtype=start)
    optimizer = stated.KFAC(model, momentum=0.9, **EVERY)
    train(model, optimizer, [rows(dtype=start)])
    model.to(goal)
    before = parameters(model)
    train(model, optimizer, [rows(dtype=goal) for _ in range(3)])
    assert updates(optimizer) == {4}
    assert_moved(model, before)
    assert all(p.dtype == goal and torch.isfinite(p).all() for p in model.parameters())


def test_a_float64_model_under_autocast_trains() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    for x, y in (rows(64) for _ in range(3)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    assert updates(optimizer) == {3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FISHERS
def test_half_precision_weights_train(dtype: torch.dtype, fisher: str) -> None:
    model = mlp(dtype=dtype)
    start = parameters(model)
    optimizer = stated.RSKFAC(model, rank=2, momentum=0.9, fisher=fisher, **EVERY)
    train(model, optimizer, [rows(dtype=dtype) for _ in range(5)])
    assert updates(optimizer) == {5}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_moved(model, start)
    assert all(value.dtype == torch.float32 for value in averages(optimizer).values())


def test_an_interrupt_inside_step_leaves_the_model_and_the_next_step_works() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows()])
    start, block = parameters(model), optimizer._blocks["4"]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    block.decompose = stop  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        train(model, optimizer, [rows()])
    del block.decompose
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())
    train(model, optimizer, [rows()])
    assert_moved(model, start)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_in_a_forward_without_the_root_does_not_end_sampling(interruption: type[BaseException]) -> None:
    model: Any = nn.Module()
    model.body, model.head = mlp()[:4], nn.Linear(7, 4).double()
    optimizer = stated.KFAC(model, fisher="mc", **EVERY)

    def stop(*_: Any) -> None:
        raise interruption

    handle = model.body[0].register_forward_hook(stop)
    with pytest.raises(interruption):
        model.body(rows()[0])
    handle.remove()
    for x, y in (rows() for _ in range(2)):
        optimizer.zero_grad()
        F.cross_entropy(model.head(model.body(x)), y).backward()
        optimizer.step()
    assert updates(optimizer) == {2}


def test_logits_changed_in_place_are_served_or_refused_in_words_by_step() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = stated.KFAC(model, fisher="mc", **EVERY)
    logits = model(x)
    logits.div_(2.0)
    F.cross_entropy(logits, y).backward()
    said = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    assert "in place" in said or updates(optimizer) == {1}


@FISHERS
def test_a_layer_thawed_after_zero_grad_is_observed(fisher: str) -> None:
    """As in adversarial training: the network is frozen when gradients are dropped, and trained right after."""
    model = mlp()
    optimizer = stated.KFAC(model, fisher=fisher, **EVERY)
    for x, y in (rows() for _ in range(3)):
        model.requires_grad_(False)
        optimizer.zero_grad()
        model.requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert updates(optimizer) == {3}


def test_two_forwards_drawn_by_hand_without_the_root_equal_those_with_it() -> None:
    """sample_fisher ends a forward: the same layers called again are more samples, not more positions."""
    net = mlp()
    model: Any = nn.Module()
    other, (x, y) = twin(net), rows()
    model.body, model.head = net[:4], net[4]
    optimizer, reference = (stated.KFAC(m, lr=0.0, fisher="mc", **EVERY) for m in (model, other))
    for call, owner in ((lambda v: model.head(model.body(v)), optimizer), (other, reference)):
        losses = []
        for view in (x, x + 1):
            logits = call(view)
            owner.sample_fisher(logits)
            losses.append(F.cross_entropy(logits, y))
        sum(losses).backward()
        owner.step()
    for mine, theirs in zip(averages(optimizer).values(), averages(reference).values(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("change", [lambda g: 0.01 * g, lambda g: g.clamp(-1e-4, 1e-4)], ids=["scaled", "clamped"])
def test_a_user_s_gradient_hook_does_not_retire_a_layer(change: Any) -> None:
    model = mlp()
    model[2].weight.register_hook(change)
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows() for _ in range(2)])
    assert all(record.covered and not record.reason for record in optimizer.report())

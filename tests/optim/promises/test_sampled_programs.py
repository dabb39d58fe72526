"""fisher="mc" in programs that do not call the root module, return objects, fail, or never differentiate."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    averages,
    mlp,
    parameters,
    rows,
    step,
    twin,
    updates,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "fisher": "mc"}


class Lightning(nn.Module):
    """`training_step` calls the network, nobody calls the module itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


class Pieces(nn.Module):
    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head = net[:4], net[4]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@dataclass
class Output:
    """What Hugging Face models return."""

    logits: Tensor
    hidden: Tensor


class Speaking(nn.Module):
    def __init__(self, net: nn.Sequential, form: str) -> None:
        super().__init__()
        self.net, self.form = net, form

    def forward(self, x: Tensor) -> Any:
        hidden = self.net[:4](x)
        logits = self.net[4](hidden)
        forms: dict[str, Any] = {
            "object": Output(logits, hidden),
            "mapping": {"hidden": hidden, "logits": logits},
            "lonely": (logits, x.argmax(-1), "words"),
        }
        return forms[self.form]


def in_pieces(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model.body(x)), y)


def by_the_root(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("program", ["training_step", "pieces"])
def test_layers_called_without_the_root_get_the_factors_of_the_root_call(program: str) -> None:
    net = mlp()
    reference = twin(net)
    model: Any = Lightning(net) if program == "training_step" else Pieces(net)
    optimizer, expected = stated.KFAC(model, **EVERY), stated.KFAC(reference, **EVERY)
    start = parameters(net)
    for x, y in (rows() for _ in range(4)):
        optimizer.zero_grad()
        (model.training_step(x, y) if program == "training_step" else in_pieces(model, x, y)).backward()
        optimizer.step()
        step(reference, expected, (x, y))
    assert updates(optimizer) == {4}
    for mine, theirs in zip(averages(optimizer).values(), averages(expected).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert_same_parameters(net, reference)
    assert_moved(net, start)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("program", [in_pieces, by_the_root])
@pytest.mark.parametrize("every", [1, 7])
def test_nothing_is_kept_over_120_steps(program: Any, every: int) -> None:
    model = Pieces(mlp())
    optimizer = stated.RSKFAC(model, rank=2, fisher="mc", factor_every=every, inverse_every=60)
    counts = []
    for number in range(120):
        x, y = rows(4)
        optimizer.zero_grad()
        program(model, x, y).backward()
        optimizer.step()
        if number in (63, 119):
            del x, y
            counts.append(live_tensors())
    assert counts[1] <= counts[0] + 2


@pytest.mark.parametrize("form", ["object", "mapping", "lonely"])
def test_outputs_of_every_form_give_the_factors_of_plain_logits(form: str) -> None:
    net = mlp()
    reference, model = twin(net), Speaking(net, form)
    optimizer, expected = stated.KFAC(model, **EVERY), stated.KFAC(reference, **EVERY)
    for x, y in (rows() for _ in range(3)):
        optimizer.zero_grad()
        out = model(x)
        logits = out.logits if form == "object" else out["logits"] if form == "mapping" else out[0]
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        step(reference, expected, (x, y))
    assert_same_parameters(net, reference)
    assert updates(optimizer) == {3}


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_forwards_that_are_never_differentiated_count_for_nothing(when: str) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(3)]
    optimizer, reference = (stated.KFAC(m, **EVERY) for m in (model, other))
    for x, y in batches:
        if when == "before":
            model(torch.randn(50, 6).double() * 100)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if when == "between":
            model(torch.randn(50, 6).double() * 100)
        loss.backward()
        if when == "after":
            model(torch.randn(50, 6).double() * 100)
        optimizer.step()
        step(other, reference, (x, y))
    assert_same_averages(optimizer, reference)
    assert_same_parameters(model, other)


def test_nan_logits_let_a_grad_scaler_skip_the_step() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = stated.KFAC(model, **EVERY)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = parameters(model)
    for bad in (True, False):
        x, y = rows(dtype=torch.float32)
        optimizer.zero_grad()
        logits = model(x * float("nan") if bad else x)
        scaler.scale(F.cross_entropy(logits, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        if bad:
            assert scaler.get_scale() == 4.0
            assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())
            assert updates(optimizer) == {0}
    assert updates(optimizer) == {1}
    assert_moved(model, start)


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[:2](x)
        h = checkpoint(self.net[2:4], h, use_reentrant=self.reentrant)
        return self.net[4](h)


def test_reentrant_checkpointing_is_refused_in_words() -> None:
    model = Checkpointed(mlp(), reentrant=True)
    optimizer = stated.KFAC(model, **EVERY)
    start, (x, y) = parameters(model), rows()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"reentrant checkpoint.*use_reentrant=False"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


def test_checkpointing_without_reentry_equals_the_plain_model() -> None:
    net = mlp()
    reference, model = twin(net), Checkpointed(net, reentrant=False)
    optimizer, expected = stated.KFAC(model, **EVERY), stated.KFAC(reference, **EVERY)
    for batch in (rows() for _ in range(3)):
        step(model, optimizer, batch)
        step(reference, expected, batch)
    assert updates(optimizer) == {3}
    assert_same_parameters(net, reference)


class ReturnsItsLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def test_a_scalar_output_is_refused_in_words_and_leaves_the_model() -> None:
    model = ReturnsItsLoss(mlp())
    optimizer = stated.KFAC(model, **EVERY)
    start = parameters(model)
    model(*rows()).backward()
    with pytest.raises(ValueError, match=r"single number.*sample_fisher"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


class DrawnWhereTheGeneratorLives(TorchFunctionMode):
    """Counts draws, and refuses what a GPU would refuse: a generator of another device than the draw's."""

    draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:  # labels[..., None]: indexing asks for a real GPU even of tensors that pretend
            return args[0].unsqueeze(-1)
        if (generator := kwargs.get("generator")) is not None:
            place = kwargs["device"] if "device" in kwargs else args[0].device
            assert torch.device(place).type == generator.device.type
            self.draws += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("likelihood", [rkfac.Categorical(), rkfac.Gaussian(), rkfac.Bernoulli()])
def test_a_generator_on_the_cpu_serves_logits_on_a_gpu(likelihood: Any) -> None:
    """With tensors that only pretend to be on a GPU."""
    with FakeTensorMode(), DrawnWhereTheGeneratorLives() as mode:
        logits = torch.empty(5, 4, device="cuda")
        gradient = likelihood.draw_gradient(logits, torch.Generator())
        assert gradient.device == logits.device
    assert mode.draws == 1

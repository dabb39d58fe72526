"""What users do to their models must not change what the optimizer computes."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rkfac
from optim.enrolled import Enrolled
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    same,
    sentences,
    speaker,
    step,
    train,
    twin,
)

Build = Callable[..., rkfac.KFAC]
EVERY: dict[str, Any] = {"factor_every": 2, "inverse_every": 3}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("make, draw", [(mlp, rows), (convnet, images)], ids=["rows", "images"])
def test_in_place_activations_equal_out_of_place(build: Build, make: Any, draw: Any, fisher: str) -> None:
    model, other = make(inplace=False), make(inplace=True)
    other.load_state_dict(model.state_dict())
    optimizer, inplace = build(model, fisher=fisher, **EVERY), build(other, fisher=fisher, **EVERY)
    batches = [draw() for _ in range(4)]
    train(model, optimizer, batches)
    train(other, inplace, batches)
    assert_same_averages(inplace, optimizer, exactly=True)
    assert_same_parameters(other, model, exactly=True)


def test_channels_last_equals_contiguous(build: Build) -> None:
    model = convnet()
    other = twin(model).to(memory_format=torch.channels_last)
    optimizer, last = build(model, momentum=0.9, **EVERY), build(other, momentum=0.9, **EVERY)
    start = parameters(model)
    for x, y in (images() for _ in range(4)):
        step(model, optimizer, (x, y))
        step(other, last, (x.to(memory_format=torch.channels_last), y))
    assert other[0].weight.is_contiguous(memory_format=torch.channels_last)
    # A bias before a batch norm has no gradient; only an input factor that couples it to the weight moves it.
    assert_moved(model, {name: p for name, p in start.items() if name != "0.bias"})
    assert_same_averages(last, optimizer)
    assert_same_parameters(other, model, rtol=1e-7, atol=1e-9)


class Checkpointed(nn.Module):
    """The same layers, with the middle recomputed in the backward pass."""

    def __init__(self, layers: nn.Sequential, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = layers
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        if self.reentrant is None:
            h = self.layers[1:4](h)
        else:
            h = checkpoint(self.layers[1:4], h, use_reentrant=self.reentrant)
        return self.layers[4:](h)


@pytest.mark.parametrize("reentrant, fisher", [(True, "empirical"), (False, "empirical"), (False, "mc")])
@pytest.mark.parametrize("make, draw", [(mlp, rows), (convnet, images)], ids=["rows", "images"])
def test_activation_checkpointing_counts_every_layer_once(
    build: Enrolled, make: Any, draw: Any, reentrant: bool, fisher: str
) -> None:
    if reentrant and "reentrant checkpoints" in build.lacks:
        pytest.skip("it refuses them by name")
    layers = make()
    model, other = Checkpointed(layers, None), Checkpointed(twin(layers), reentrant)
    optimizer, recomputing = (build(m, fisher=fisher, **EVERY) for m in (model, other))
    batches = [draw() for _ in range(4)]
    train(model, optimizer, batches)
    train(other, recomputing, batches)
    assert_same_averages(recomputing, optimizer)
    assert_same_parameters(other, model)


@pytest.mark.parametrize("make", [reader, speaker])
def test_forwards_that_are_not_training_change_nothing(build: Build, make: Any) -> None:
    model = make()
    other, batches = twin(model), [sentences() for _ in range(4)]
    optimizer, plain = build(model, **EVERY), build(other, **EVERY)
    for x, y in batches:
        model.eval()
        model(torch.randint(9, (3, 5)))
        model.train()
        with torch.no_grad():
            model(torch.randint(9, (3, 5)))
        model(torch.randint(9, (3, 5)))  # differentiable, but nobody does
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.inference_mode():
            model(torch.randint(9, (3, 5)))
        model.train()
        loss.backward()
        with torch.no_grad():
            model(torch.randint(9, (3, 5)))
        optimizer.step()
        step(other, plain, (x, y))
    assert_same_averages(optimizer, plain, exactly=True)
    assert_same_parameters(model, other, exactly=True)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_parameter_unfrozen_later_is_trained_as_if_it_always_had_been(build: Enrolled, part: str) -> None:
    """With lr 0 until then and no memory in the averages, the past leaves no trace: a fresh optimizer must agree."""
    model = reader()
    other, batches = twin(model), [sentences() for _ in range(4)]
    settings = {"momentum": 0.0, "factor_decay": 0.0, "factor_start": "unbiased", "factor_every": 1, "inverse_every": 1}
    settings |= {"decomposition": rkfac.Exact()}
    settings |= build.forgets | ({"betas": (0.0, 0.0)} if "momentum" in build.lacks else {})
    settings |= {"columns": None} if "decomposition" in build.lacks else {}  # draws are numbered by refreshes
    getattr(model.hidden, part).requires_grad_(False)
    optimizer = build(model, lr=0.0, **settings)
    start = parameters(model)
    train(model, optimizer, batches[:2])
    assert getattr(model.hidden, part).grad is None
    getattr(model.hidden, part).requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.1
    late = build(other, lr=0.1, **settings)
    train(model, optimizer, batches[2:3])
    train(other, late, batches[2:3])
    assert_same_averages(optimizer, late)
    assert_same_parameters(model, other)
    assert_moved(model, start)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_frozen_parameter_stays_put_and_the_rest_goes_on(build: Build, part: str) -> None:
    model = mlp()
    optimizer = build(model, momentum=0.9, factor_every=1, inverse_every=2)
    train(model, optimizer, [rows() for _ in range(2)])
    getattr(model[2], part).requires_grad_(False)
    start = parameters(model)
    train(model, optimizer, [rows() for _ in range(3)])
    stayed = {name for name, value in parameters(model).items() if torch.equal(value, start[name])}
    assert stayed == {f"2.{part}"}
    assert all(value.isfinite().all() for value in parameters(model).values())


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert isinstance(copied, nn.Module)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make, draw", [(convnet, images), (speaker, sentences)], ids=["images", "speech"])
def test_a_copied_model_is_inert_and_usable(
    build: Build, duplicate: Callable[[nn.Module], nn.Module], make: Any, draw: Any
) -> None:
    model = make()
    optimizer = build(model, factor_every=1, inverse_every=1)
    train(model, optimizer, [draw()])
    copied = duplicate(model)
    before = copy.deepcopy(optimizer.state_dict())
    x, y = draw()
    copied.train()
    F.cross_entropy(copied(x), y).backward()
    other = twin(model)
    plain = build(other, factor_every=1, inverse_every=1)
    plain.load_state_dict(before)
    batch = draw()
    for m, o in ((model, optimizer), (other, plain)):
        m.zero_grad()
        F.cross_entropy(m(batch[0]), batch[1]).backward()  # no zero_grad of the optimizer: leaks would stay
        o.step()
    assert_same_averages(optimizer, plain, exactly=True)
    # The copy has an optimizer of its own, equal to one on a model that was never hooked.
    clean = make()
    clean.load_state_dict(copied.state_dict())
    mine, theirs = build(copied, **EVERY), build(clean, **EVERY)
    copied.zero_grad()
    batches = [draw() for _ in range(3)]
    train(copied, mine, batches)
    train(clean, theirs, batches)
    assert_same_parameters(copied, clean, exactly=True)


def test_an_optimizer_refuses_to_be_copied_and_says_what_to_do(build: Build) -> None:
    optimizer = build(mlp())
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        torch.save(optimizer, io.BytesIO())


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_forgotten_optimizer_removes_its_hooks(build: Build, scheduled: bool) -> None:
    model = convnet()
    optimizer: Any = build(model, **EVERY)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    train(model, optimizer, [images()])
    assert hooks(model) > 0
    gone = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert gone() is None
    assert hooks(model) == 0
    model(images()[0])


def test_a_closed_optimizer_steps_with_what_it_has(build: Enrolled) -> None:
    if "fixed periods" in build.lacks:
        pytest.skip("the twin sleeps by its periods")
    if "steps without hooks" in build.lacks:
        pytest.skip("its steps run the batch again that its hooks have seen")
    model = mlp()
    optimizer = build(model, momentum=0.0, factor_every=1, inverse_every=1)
    train(model, optimizer, [rows() for _ in range(2)])
    other = twin(model)
    sleeping = build(other, momentum=0.0, factor_every=1000, inverse_every=1000)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(factor_every=1000, inverse_every=1000)
    sleeping.load_state_dict(state)
    sleeping.zero_grad()  # plans anew: nothing to collect before step 1000
    optimizer.close()
    optimizer.close()  # twice is as good as once
    optimizer.param_groups[0]["inverse_every"] = 1000
    assert hooks(model) == 0
    frozen, batches = averages(optimizer), [rows() for _ in range(2)]
    train(model, optimizer, batches)
    train(other, sleeping, batches)
    assert same(averages(optimizer), frozen)
    assert_same_parameters(model, other, exactly=True)


def test_two_optimizers_share_one_model(build: Enrolled) -> None:
    """Each one's layers are what they would be if it were alone, and closing one does not blind the other."""
    model = mlp()
    first = build(model, params=model[0].parameters(), **EVERY)
    second = build(model, params=model[4].parameters(), **EVERY)
    for x, y in (rows() for _ in range(3)):
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    first.close()
    before = averages(second)
    second.param_groups[0][build.period] = 1
    train(model, second, [rows()])
    after = averages(second)
    assert {name.split(".")[0] for name in after} == {"4"}
    assert all(not torch.equal(after[name], before[name]) for name in after)

"""Whatever the loss averages over or is multiplied by, the factors are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
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
    twin,
)

Build = Callable[..., rkfac.KFAC]
EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2}
# BatchNorm sees another batch in half a batch, so the image case stops short of it.
plain_convnet = lambda: nn.Sequential(*(m for m in convnet() if not isinstance(m, nn.BatchNorm2d)))  # noqa: E731
CASES = {
    "rows": (mlp, rows),
    "images": (plain_convnet, images),
    "text": (reader, sentences),
    "speech": (speaker, sentences),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


@pytest.mark.parametrize("split", [0.5, 0.25], ids=["halves", "ragged"])
def test_accumulated_batches_equal_one_batch(build: Build, case: Any, split: float) -> None:
    make, draw = case
    model = make()
    other = twin(model)
    optimizer, whole = build(model, **EVERY), build(other, **EVERY)
    for x, y in (draw(8) for _ in range(3)):
        optimizer.zero_grad()
        cut = int(8 * split)
        for part in (slice(None, cut), slice(cut, None)):
            (F.cross_entropy(model(x[part]), y[part]) * len(y[part]) / len(y)).backward()
        optimizer.step()
        step(other, whole, (x, y))
    assert_same_averages(optimizer, whole)
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


def test_a_duplicated_batch_gives_the_same_factors(build: Build, case: Any) -> None:
    make, draw = case
    model = make()
    other = twin(model)
    optimizer, doubled = build(model, **EVERY), build(other, **EVERY)
    for x, y in (draw(5) for _ in range(3)):
        step(model, optimizer, (x, y))
        step(other, doubled, (torch.cat([x, x]), torch.cat([y, y])))
    assert_same_averages(doubled, optimizer)
    assert_same_parameters(other, model, rtol=1e-7, atol=1e-9)


def test_a_ragged_last_batch_counts_its_own_samples(build: Build) -> None:
    """The factors of a batch of 3 after one of 12 are those of an optimizer that only ever saw 3."""
    model = mlp()
    other = twin(model)
    settings: dict[str, Any] = {"factor_decay": 0.0, "factor_start": "unbiased", "factor_every": 1, "inverse_every": 1}
    ragged = build(model, lr=0.0, **settings)
    only = build(other, lr=0.0, **settings)
    last = rows(3)
    step(model, ragged, rows(12))
    step(model, ragged, last)
    step(other, only, last)
    assert_same_averages(ragged, only)


def test_a_summed_loss_gives_the_factors_of_the_mean_loss(build: Build, case: Any) -> None:
    make, draw = case
    model = make()
    other, (x, y) = twin(model), draw()
    mean, total = build(model, **EVERY), build(other, loss_average="sum", **EVERY)
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(other(x), y, reduction="sum").backward()
    mean.step()
    total.step()
    assert_same_averages(total, mean)


def test_a_loss_averaged_over_tokens_gives_the_factors_of_its_sum(build: Build) -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 4)).double()
    model = nn.Sequential(model[0], model[2])  # per-token layers only
    other = twin(model)
    tokens, labels = torch.randint(9, (5, 7)), torch.randint(4, (5, 7))
    mean, total = build(model, loss_average="tokens", **EVERY), build(other, loss_average="sum", **EVERY)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(other(tokens.flatten()), labels.flatten(), reduction="sum").backward()
    mean.step()
    total.step()
    assert_same_averages(mean, total)


# --- gradient scaling


def scaler_for(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def scaled_step(model: nn.Module, optimizer: Any, scaler: Any, batch: Any, unscale: bool = False) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make, draw", [(mlp, rows), (convnet, images)], ids=["rows", "images"])
@pytest.mark.parametrize("way", ["step", "unscale_", "disabled"])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_a_gradient_scaler_leaves_no_trace(build: Build, make: Any, draw: Any, way: str, fisher: str) -> None:
    """bf16 scales by powers of two without rounding: scaled and unscaled runs may differ by float32 rounding only.

    The parameters stand still while factors are compared, for a bf16 forward turns the last bit of one into much more.
    """
    model = make(dtype=torch.float32)
    other = twin(model)
    scaler = scaler_for() if way != "disabled" else torch.amp.GradScaler("cpu", enabled=False)
    optimizer = build(model, lr=0.0, fisher=fisher, **EVERY)
    plain = build(other, lr=0.0, fisher=fisher, **EVERY)
    start = parameters(model)
    for lr in (0.0, 0.0, 0.0, 0.1):  # the scale grows on the way
        optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = lr
        batch = draw(dtype=torch.float32)
        scaled_step(model, optimizer, scaler, batch, unscale=way == "unscale_")
        scaled_step(other, plain, torch.amp.GradScaler("cpu", enabled=False), batch)
    assert_same_averages(optimizer, plain, rtol=1e-5, atol=1e-8)
    assert_moved(model, start)
    assert_same_parameters(model, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["scaler.step", "optimizer.step"])
def test_gradients_that_are_unscaled_and_clipped_give_the_steps_without_a_scaler(build: Build, way: str) -> None:
    """torch's recipe as it stands; whoever steps past the scaler names it, for the call of its step is what is seen."""
    model = mlp(dtype=torch.float32)
    other, scaler = twin(model), scaler_for()
    optimizer = build(model, grad_scaler=scaler if way == "optimizer.step" else None, **EVERY)
    plain = build(other, **EVERY)
    start = parameters(model)
    for x, y in (rows(dtype=torch.float32) for _ in range(4)):  # the scale grows on the way
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if way == "scaler.step":
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()
        plain.zero_grad()
        F.cross_entropy(other(x), y).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        plain.step()
    assert scaler.get_scale() == 4096.0
    assert_moved(model, start)
    assert_same_averages(optimizer, plain, rtol=1e-5, atol=1e-8)
    assert_same_parameters(model, other, rtol=1e-4, atol=1e-5)


def test_a_scaler_that_has_unscaled_nothing_says_nothing(build: Build) -> None:
    """Losses that nobody scaled, though a scaler is named or there is one that is turned off."""
    model = mlp(dtype=torch.float32)
    other, off = twin(model), torch.amp.GradScaler("cpu", enabled=False)
    optimizer, plain = build(model, grad_scaler=scaler_for(), **EVERY), build(other, grad_scaler=off, **EVERY)
    for batch in (rows(dtype=torch.float32) for _ in range(2)):
        step(model, optimizer, batch)
        step(other, plain, batch)
    assert_same_averages(optimizer, plain, rtol=0.0, atol=0.0)
    assert_same_parameters(model, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("unscale", [False, True])
def test_an_infinite_scaled_gradient_skips_step_statistics_and_counters(build: Build, unscale: bool) -> None:
    model = mlp(dtype=torch.float32)
    scaler = scaler_for()
    optimizer = build(model, momentum=0.9, factor_every=1, inverse_every=2)
    scaled_step(model, optimizer, scaler, rows(dtype=torch.float32))
    before, start = (
        torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, optimizer.state_dict()),
        parameters(model),
    )
    optimizer.zero_grad()
    x, y = rows(dtype=torch.float32)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    model[0].bias.grad[1] = float("inf")
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert same(optimizer.state_dict(), before)
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())
    # And the step after it is an ordinary one: nothing of the skipped batch is left over.
    other = twin(model)
    plain = build(other, momentum=0.9, factor_every=1, inverse_every=2)
    plain.load_state_dict(before)
    batch = rows(dtype=torch.float32)
    scaled_step(model, optimizer, scaler, batch)
    scaled_step(other, plain, torch.amp.GradScaler("cpu", enabled=False), batch)
    assert_same_averages(optimizer, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_statistics_and_steps_inside_autocast_keep_float32(build: Build, fisher: str) -> None:
    """A whole training step written inside `with torch.autocast(...)` must not compute curvature in bf16."""
    model = convnet(dtype=torch.float32)
    other = twin(model)
    inside, outside = build(model, fisher=fisher, **EVERY), build(other, fisher=fisher, **EVERY)
    for x, y in (images(dtype=torch.float32) for _ in range(3)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside.zero_grad()
            F.cross_entropy(model(x), y).backward()
            inside.step()
        outside.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(other(x), y)
        loss.backward()
        outside.step()
    assert all(value.dtype == torch.float32 for value in averages(inside).values())
    assert_same_averages(inside, outside, rtol=1e-5, atol=1e-7)
    assert_same_parameters(model, other, rtol=1e-5, atol=1e-6)

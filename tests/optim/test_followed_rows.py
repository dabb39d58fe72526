"""Wide Linear layers: what a step asks of a gradient comes from the rows that it is the sum of, and is never believed blindly."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rkfac
from rkfac.curvature.following import PATIENCE, Follower
from rkfac.linalg import Modes

RULES: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "maximize": True, "lr": 0.002},
    {"graft": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    {"graft": None, "momentum": 0.0, "lr": 1e-3, "update_clip": 0.05},
    {"graft": None, "momentum": 0.9, "lr": 1e-3, "kl_clip": 1e-3},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"momentum": 0.9, "damping_rule": "product"},
    {"momentum": 0.9, "apply": "backward"},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "apply": "backward"},
]
EVERY: dict[str, Any] = {"factor_every": 3, "inverse_every": 5, "eager_start": False, "rank": 6, "lr": 0.05, "seed": 3}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(200, 210), nn.ReLU(inplace=True), nn.Linear(210, 190, bias=False), nn.Tanh(), nn.Linear(190, 5)]
    return nn.Sequential(*layers).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 200, generator=g, dtype=torch.float64).to(dtype), torch.randint(0, 5, (8,), generator=g)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(
    rule: dict[str, Any],
    one_pass: Callable[[nn.Module, rkfac.KFAC, Tensor, Tensor], None] | None = None,
    dtype: torch.dtype = torch.float64,
    count: int = 14,
) -> tuple[Tensor, list[int]]:
    """The parameters after some steps, and for how many steps in a row each followed layer was followed last."""
    model = network(dtype)
    optimizer = rkfac.RSKFAC(model, **{**EVERY, **rule})
    for x, y in batches(count, dtype):
        optimizer.zero_grad()
        if one_pass is None:
            loss(model, x, y).backward()
        else:
            one_pass(model, optimizer, x, y)
        optimizer.step()
    return flat(model), followed(optimizer)


def after(count: int) -> tuple[nn.Module, rkfac.KFAC]:
    """A model and its optimizer after some plain steps."""
    model = network()
    optimizer = rkfac.RSKFAC(model, **EVERY)
    for x, y in batches(count):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
    return model, optimizer


def followed(optimizer: rkfac.KFAC) -> list[int]:
    return [b.follower.followed for b in optimizer._blocks.values() if b.follower is not None]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def apart(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The same training without rows: every matrix is projected."""

    def without(*args: Any, **kwargs: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(Follower, "saw", lambda *_: None)
            end, never = train(*args, **kwargs)
            assert not any(never)
            return end

    return without


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_step_is_the_same(rule: dict[str, Any], twin: Callable[..., Tensor]) -> None:
    end, steps = train(rule)
    assert len(steps) == 2
    assert all(steps), "nothing was followed: this compares nothing"
    assert apart(end, twin(rule)) < 1e-11


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_single_precision_loses_no_more_than_without_rows(rule: dict[str, Any], twin: Callable[..., Tensor]) -> None:
    end, steps = train(rule, dtype=torch.float32)
    assert any(steps), "nothing was followed: this compares nothing"
    truth = twin(rule)
    assert apart(end, truth) < 2 * apart(twin(rule, dtype=torch.float32), truth) + 1e-6


def test_decay_inside_of_a_buffer_is_not_followed(twin: Callable[..., Tensor]) -> None:
    rule = {"momentum": 0.9, "weight_decay": 0.1}
    end, steps = train(rule)
    assert steps == [0, 0]
    assert torch.equal(end, twin(rule))


def test_few_columns_or_many_rows_are_not_followed() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, **EVERY)
    x, y = torch.randn(300, 200, dtype=torch.float64), torch.randint(0, 5, (300,))
    loss(model, x, y).backward()
    optimizer.step()
    assert all(block.follower is None for block in optimizer._blocks.values())


# --- programs in which rows and gradient still belong together


def halves(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    for part in (slice(0, 3), slice(3, 8)):
        (loss(model, x[part], y[part]) / 2).backward()


def clipped(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def scaled_by_hand(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    (loss(model, x, y) * 1024).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= 1024


def sequences(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x.reshape(2, 4, 200)).flatten(0, 1), y).backward()


def checkpointed(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()


def beside_a_validation(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x.flip(0), y).item()  # a forward that nobody differentiates
    with torch.no_grad():
        model(x)
    loss(model, x, y).backward()


TOGETHER = [halves, clipped, scaled_by_hand, sequences, beside_a_validation]


@pytest.mark.parametrize("one_pass", TOGETHER)
@pytest.mark.parametrize("rule", [RULES[1], RULES[2], RULES[4], RULES[9]], ids=str)
def test_programs_that_are_followed(one_pass: Any, rule: dict[str, Any], twin: Callable[..., Tensor]) -> None:
    end, steps = train(rule, one_pass)
    assert all(steps), "nothing was followed: this compares nothing"
    assert apart(end, twin(rule, one_pass)) < 1e-11


# --- programs in which they do not: nobody tells, and the step must be that of the gradient


def one_entry(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    weight = model[0].weight  # type: ignore[index]
    weight.grad[0, 0] += 1e-3


def noise(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    g = torch.Generator().manual_seed(7)
    for p in model.parameters():
        assert p.grad is not None
        p.grad += 1e-4 * torch.randn(p.shape, generator=g, dtype=p.dtype)


def centralised(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    for p in model.parameters():
        if p.grad is not None and p.ndim > 1:
            p.grad -= p.grad.mean(1, keepdim=True)


def only_the_bias(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    model[0].bias.grad *= 3  # type: ignore[index]


def zeroed_by_the_model(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x.flip(0), y).backward()
    model.zero_grad()
    loss(model, x, y).backward()


def with_respect_to_inputs(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    other = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(model, other, y), other)
    loss(model, x + 0.1 * slope.sign(), y).backward()


def penalised(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    (loss(model, x, y) + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()


def another_buffer(model: nn.Module, optimizer: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    loss(model, x, y).backward()
    for state in optimizer.state.values():
        for buffer in state.values():
            if isinstance(buffer, Tensor):
                buffer.mul_(0.5)


def input_overwritten(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
    first = x[:4].clone()
    out = model(first)
    first.data.zero_()  # behind autograd's back, whose own gradient sees it as well
    F.cross_entropy(out, y[:4]).backward()


APART = [one_entry, noise, centralised, only_the_bias, zeroed_by_the_model, with_respect_to_inputs, penalised]
APART += [another_buffer, input_overwritten, checkpointed]


@pytest.mark.parametrize("one_pass", APART)
@pytest.mark.parametrize("rule", [RULES[0], RULES[1], RULES[2], RULES[4]], ids=str)
def test_programs_that_deceive(one_pass: Any, rule: dict[str, Any], twin: Callable[..., Tensor]) -> None:
    assert apart(train(rule, one_pass)[0], twin(rule, one_pass)) < 1e-11


def test_a_hook_of_somebodys_that_changes_the_weights_gradient(twin: Callable[..., Tensor]) -> None:
    def hooked(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
        handle = model[0].weight.register_hook(lambda g: g * torch.linspace(0, 2, 200, dtype=g.dtype))  # type: ignore[index]
        loss(model, x, y).backward()
        handle.remove()

    assert apart(train(RULES[1], hooked)[0], twin(RULES[1], hooked)) < 1e-11


def test_sixteen_bits_on_the_way(twin: Callable[..., Tensor]) -> None:
    def cast(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.float(), y).backward()

    assert apart(train(RULES[1], cast, torch.float32)[0], twin(RULES[1], cast, torch.float32)) < 1e-4


@pytest.mark.parametrize("size", [1e-18, 1e-9, 1e9, 1e18])
def test_gradients_of_any_size(size: float, twin: Callable[..., Tensor]) -> None:
    def sized(model: nn.Module, _: rkfac.KFAC, x: Tensor, y: Tensor) -> None:
        (loss(model, x, y) * size).backward()

    rule = {"momentum": 0.9, "lr": 0.05 / size}
    end, expected = train(rule, sized, torch.float32)[0], twin(rule, sized, torch.float32)
    assert bool(torch.isfinite(end).all())
    assert apart(end, expected) < 1e-4


@pytest.mark.parametrize("rule", [RULES[1], RULES[2], RULES[4], RULES[5], RULES[9]], ids=str)
@pytest.mark.parametrize("at", [6, 8, 10])
def test_resumes_bit_for_bit_within_a_period(rule: dict[str, Any], at: int) -> None:
    model, steps = network(torch.float32), list(batches(16, torch.float32))
    optimizer = rkfac.RSKFAC(model, **{**EVERY, **rule})

    def go(model: nn.Module, optimizer: rkfac.KFAC, part: list[tuple[Tensor, Tensor]]) -> Tensor:
        for x, y in part:
            optimizer.zero_grad()
            loss(model, x, y).backward()
            optimizer.step()
        return flat(model)

    go(model, optimizer, steps[:at])
    other = copy.deepcopy(model)
    resumed = rkfac.RSKFAC(other, **{**EVERY, **rule})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(go(other, resumed, steps[at:]), go(model, optimizer, steps[at:]))
    assert followed(resumed)


def test_a_damaged_shadow_is_refused_and_changes_nothing() -> None:
    _model, optimizer = after(7)
    good = copy.deepcopy(optimizer.state_dict())
    for damage in (lambda t: t[:, :-1], lambda t: t * float("nan"), lambda t: None):
        bad = copy.deepcopy(good)
        saved = bad["curvature"]["blocks"]["0"]["follower"]
        saved["output"] = damage(saved["output"])
        with pytest.raises(ValueError, match="momentum"):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()["curvature"]["blocks"]["0"]["follower"]
        assert torch.equal(now["output"], good["curvature"]["blocks"]["0"]["follower"]["output"])


def test_nothing_is_watched_after_close_or_in_a_copy() -> None:
    model, optimizer = after(3)
    optimizer.zero_grad()
    x, y = next(batches(1))
    loss(copy.deepcopy(model), x, y).backward()
    followers = [b.follower for b in optimizer._blocks.values() if b.follower is not None]
    assert followers
    assert all(f.fresh is None for f in followers)
    optimizer.close()
    loss(model, x, y).backward()
    assert all(f.fresh is None for f in followers)
    optimizer.step()  # with the curvature it has


def test_a_refused_step_leaves_a_state_that_loads() -> None:
    model = network(torch.float32)
    optimizer = rkfac.RSKFAC(model, **EVERY)
    for step, (x, y) in enumerate(batches(8, torch.float32)):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        if step == 7:
            model[0].weight.grad[3, 4] = float("nan")  # type: ignore[index]
        with pytest.warns(UserWarning, match="NaN, Inf") if step == 7 else contextlib.nullcontext():
            optimizer.step()
    rkfac.RSKFAC(copy.deepcopy(model), **EVERY).load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_frozen_layers_are_not_watched() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, **EVERY)
    x, y = next(batches(1))
    loss(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(False)  # type: ignore[index]
    loss(model, x.requires_grad_(), y).backward()
    first, second = (optimizer._blocks[name].follower for name in ("0", "2"))
    assert first is not None
    assert first.fresh is None
    assert second is not None
    assert second.fresh is not None


# --- what was false once


@pytest.mark.parametrize("edit", [0.0, 1e-7, 1e-6, 3e-6, 1e-5, 2e-5, 1e-4])
@pytest.mark.parametrize("damping", [4.0, 1.3])
def test_an_edit_too_small_to_be_seen_is_too_small_to_matter(
    edit: float, damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mode that is damped most, where what is not known to be there is multiplied by the most."""

    def stepped() -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False)
        optimizer = rkfac.RSKFAC(
            model, lr=1e-3, momentum=0.0, rank=12, damping=damping, factor_every=50, inverse_every=50, eager_start=False
        )
        mixing = torch.randn(4, 256)
        for step in range(3):
            x = torch.randn(16, 4) @ mixing
            optimizer.zero_grad()
            (model(x) @ torch.ones(256, 4) - x[:, :4]).square().mean().backward()
            before = model.weight.detach().clone()
            if step == 2:
                gradient, low = model.weight.grad, optimizer._blocks[""].input.low
                assert gradient is not None
                gradient += edit * gradient.norm() * torch.randn(256, 1) / 16 * low.U[:, 0]
            optimizer.step()
        return (model.weight.detach() - before).double()

    found = stepped()
    monkeypatch.setattr(Follower, "saw", lambda *_: None)
    assert apart(found, stepped()) < 1e-3


def test_somebodys_hook_that_gives_the_output_another_shape() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, **EVERY)
    for step, (x, y) in enumerate(batches(4)):
        if step == 2:
            model[4].register_forward_hook(lambda *_: None)  # type: ignore[index]
            model[2].register_forward_hook(lambda _m, _a, out: out.mean(0, keepdim=True), prepend=True)  # type: ignore[index]
            y = y[:1]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y[: 1 if step >= 2 else 8]).backward()
        optimizer.step()
    assert bool(torch.isfinite(flat(model)).all())


def test_a_loss_that_is_kept_keeps_no_inputs_alive() -> None:
    model, kept, inputs = network(), [], []
    optimizer = rkfac.RSKFAC(model, **{**EVERY, "factor_every": 100, "inverse_every": 100})
    for step, (x, y) in enumerate(batches(6)):
        hidden = x * 1.0
        if step > 1:
            inputs.append(weakref.ref(hidden))
        optimizer.zero_grad()
        value = loss(model, hidden, y)
        value.backward()
        optimizer.step()
        kept.append(value)
        del hidden
    assert followed(optimizer) == [5, 5]
    assert not any(ref() is not None for ref in inputs)


@pytest.mark.parametrize("rule", [{"momentum": 0.9, "weight_decay": 0.1}, {**RULES[5], "apply": "backward"}], ids=str)
def test_rows_that_nobody_uses_are_soon_not_looked_at(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    of_rows = Modes.of_rows
    monkeypatch.setattr(Modes, "of_rows", lambda *args: (seen.append(1), of_rows(*args))[1])
    train({**rule, "inverse_every": 100}, count=40)
    assert len(seen) <= 2 * PATIENCE


def test_precision_that_changes_on_the_way() -> None:
    model = network(torch.float32)
    optimizer = rkfac.RSKFAC(model, **{**EVERY, "apply": "backward", "momentum": 0.9, "nesterov": True})
    for step, (x, y) in enumerate(batches(9)):
        if step == 5:
            model.double()
        optimizer.zero_grad()
        loss(model, x.to(model[0].weight.dtype), y).backward()  # type: ignore[index]
        model[0].weight.grad[0] += 1.0  # type: ignore[index]
        optimizer.step()
    assert bool(torch.isfinite(flat(model)).all())

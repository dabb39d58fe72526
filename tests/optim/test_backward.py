"""apply="backward": Linear layers get their natural gradient in the backward pass, and the step is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rkfac

EVERY: dict[str, Any] = {"factor_every": 2, "inverse_every": 3, "eager_start": False, "rank": 6, "lr": 0.05}
RULES: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "damping_rule": "pi", "relative_to": None, "damping": 0.3},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"graft": None, "momentum": 0.0, "update_clip": 0.05},
    {"graft": None, "momentum": 0.9, "kl_clip": 1e-3},
    {"momentum": 0.9, "kl_clip": 1e-3},
    {"rank": 40},
]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 32, bias=False),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 5),
    ).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 20, generator=g, dtype=torch.float64).to(dtype), torch.randint(0, 5, (8,), generator=g)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def plain_pass(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def halves(model: nn.Module, x: Tensor, y: Tensor) -> None:
    for part in (slice(0, 5), slice(5, 8)):
        (F.cross_entropy(model(x[part]), y[part]) / 2).backward()


def train(
    model: nn.Module,
    optimizer: rkfac.KFAC,
    count: int = 10,
    one_pass: Callable[[nn.Module, Tensor, Tensor], None] = plain_pass,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    seen = []
    for x, y in batches(count, dtype):
        optimizer.zero_grad()
        one_pass(model, x, y)
        optimizer.step()
        optimizer.param_groups[0]["damping"] *= 0.98  # what was preconditioned before must follow
        seen.append(flat(model))
    return seen


def pair(rule: dict[str, Any], dtype: torch.dtype = torch.float64, **more: Any) -> list[tuple[nn.Module, rkfac.KFAC]]:
    made = []
    for apply in ("step", "backward"):
        model = network(dtype)
        made.append((model, rkfac.RSKFAC(model, apply=apply, **{**EVERY, **rule, **more})))
    return made


def assert_same(ours: list[Tensor], theirs: list[Tensor], close: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).norm()) <= close * float(other.norm())


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("one_pass", [plain_pass, halves], ids=["one pass", "accumulated"])
def test_every_step_is_the_one_that_step_would_take(rule: dict[str, Any], one_pass: Any) -> None:
    plain, natural = (train(*made, one_pass=one_pass) for made in pair(rule))
    assert_same(natural, plain, 1e-10)


def test_float32_agrees_too() -> None:
    plain, natural = (train(*made, dtype=torch.float32) for made in pair({"momentum": 0.9}, torch.float32))
    assert_same(natural, plain, 1e-4)


def test_gradients_are_the_natural_ones() -> None:
    """In units of the largest multiplier, by dense inverses."""
    model = network()
    optimizer = rkfac.KFAC(model, apply="backward", lr=0.0, momentum=0.0, factor_every=1000, inverse_every=1000)
    (x, y), (x2, y2) = batches(2)
    plain_pass(model, x, y)
    optimizer.step()
    optimizer.zero_grad()
    plain_pass(model, x2, y2)
    twin = network()
    plain_pass(twin, x2, y2)
    block = optimizer._blocks["0"]
    G, A = block.output.dense(), block.input.dense()
    G, A = (M + M.diagonal().mean() * torch.eye(len(M), dtype=M.dtype) for M in (G, A))
    J = torch.cat([twin[0].weight.grad, twin[0].bias.grad[:, None]], dim=1)
    S = torch.linalg.inv(G) @ J @ torch.linalg.inv(A)
    S = S * float(torch.linalg.eigvalsh(G)[0] * torch.linalg.eigvalsh(A)[0])
    torch.testing.assert_close(model[0].weight.grad, S[:, :-1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model[0].bias.grad, S[:, -1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model[3].weight.grad, twin[3].weight.grad)  # norms have plain ones


def test_layers_with_more_rows_than_width_keep_plain_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    optimizer = rkfac.RSKFAC(model, apply="backward", lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(20, 6, dtype=torch.float64)), torch.randint(0, 3, (20,))).backward()
        optimizer.step()
    assert [name for name, block in optimizer._blocks.items() if block.rowwise is not None] == ["2"]


def test_gradients_that_came_another_way_are_preconditioned_in_the_step() -> None:
    def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> None:
        copied = copy.deepcopy(model)
        plain_pass(copied, x, y)
        plain_pass(model, x, y)  # statistics
        for p, q in zip(model.parameters(), copied.parameters(), strict=True):
            p.grad.copy_(q.grad)
        for block in optimizers[model]._blocks.values():
            block.natural = False  # as when a graph brought them

    optimizers = dict(pair({"momentum": 0.9}))
    plain, natural = (train(model, optimizer, one_pass=by_hand) for model, optimizer in optimizers.items())
    assert_same(natural, plain, 1e-10)


class Odd(nn.Module):
    """Layers called by keyword, twice, on one sample and on sequences, and inside checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(20, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(input=x.view(4, 2, 20)).relu_()
        x = self.again(self.again(x).tanh())
        x = checkpoint(self.again, x, use_reentrant=False)
        alone = torch.stack([self.again(row) for row in x.flatten(0, 1)[:2]])
        return self.last(torch.cat([alone, x.flatten(0, 1)[2:]]))


def test_odd_calls_take_the_same_steps() -> None:
    found = []
    for apply in ("step", "backward"):
        torch.manual_seed(0)
        model = Odd().double()
        optimizer = rkfac.RSKFAC(model, apply=apply, momentum=0.9, **EVERY)
        found.append(train(model, optimizer))
        if apply == "backward":
            assert optimizer._blocks["first"].rowwise is not None
    assert_same(found[1], found[0], 1e-9)


def test_a_graph_compiled_afterwards_takes_the_same_steps() -> None:
    found = []
    for model, optimizer in pair({"momentum": 0.9}):
        compiled = torch.compile(model, backend="eager")
        seen = []
        for x, y in batches(6):
            optimizer.zero_grad()
            F.cross_entropy(compiled(x), y).backward()
            optimizer.step()
            seen.append(flat(model))
        found.append(seen)
    assert_same(found[1], found[0], 1e-10)


def test_copies_keys_and_close() -> None:
    model = network()
    keys = list(model.state_dict())
    optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
    train(model, optimizer, 4)
    assert list(model.state_dict()) == keys
    x, y = next(batches(1))
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one.zero_grad()
        plain_pass(one, x, y)
    assert not torch.allclose(model[0].weight.grad, copied[0].weight.grad)
    optimizer.close()
    model.zero_grad()
    plain_pass(model, x, y)
    torch.testing.assert_close(model[0].weight.grad, copied[0].weight.grad, rtol=0, atol=0)


def test_a_saved_run_goes_on_bit_for_bit() -> None:
    rule = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    (_, (whole, first)) = pair(rule)
    expected = train(whole, first, 9)
    (_, (model, optimizer)) = pair(rule)
    data = list(batches(9))
    for x, y in data[:4]:
        optimizer.zero_grad()
        plain_pass(model, x, y)
        optimizer.step()
        optimizer.param_groups[0]["damping"] *= 0.98
    other = network()
    other.load_state_dict(model.state_dict())
    resumed = rkfac.RSKFAC(other, apply="backward", **{**EVERY, **rule})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in data[4:]:
        resumed.zero_grad()
        plain_pass(other, x, y)
        resumed.step()
        resumed.param_groups[0]["damping"] *= 0.98
    assert torch.equal(flat(other), expected[-1])


def test_a_state_of_the_other_way_is_refused() -> None:
    (model, optimizer), (_, natural) = pair({})
    train(model, optimizer, 2)
    with pytest.raises(ValueError, match="apply: step saved, backward here"):
        natural.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"graft": "adamw"}, "adamw"),
        ({"damping_rule": "product"}, "product"),
        ({"adaptive_damping": rkfac.LevenbergMarquardt()}, "adaptive_damping"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"apply='backward' does not go with .*{what}"):
        rkfac.RSKFAC(network(), apply="backward", **settings)
    with pytest.raises(ValueError, match="apply"):
        rkfac.RSKFAC(network(), apply="forward")


def test_gradients_of_gradients_are_refused_by_the_layers_name() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
    train(model, optimizer, 2)
    x, y = next(batches(1))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        F.cross_entropy(model(x), y).backward(create_graph=True)


def test_a_scaler_a_clip_and_autocast_leave_it_finite() -> None:
    model = network(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
    start = flat(model)
    for x, y in batches(6, torch.float32):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert flat(model).isfinite().all()
    assert float((flat(model) - start).norm()) > 0.1


def test_a_scaler_changes_nothing() -> None:
    found = []
    for scale in (1.0, 1024.0):
        model = network()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
        for x, y in batches(6):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(flat(model))
    assert_same([found[1]], [found[0]], 1e-10)


def test_what_is_not_natural_keeps_the_steps_of_the_other_way() -> None:
    """A bias under other rules, a penalty in the loss, the same gradient stepped on twice."""

    def penalised(model: nn.Module, x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()

    def groups(model: nn.Module, **own: Any) -> list[dict[str, Any]]:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        return [{"params": weights}, {"params": biases, **own}]

    for own in ({"momentum": 0.0}, {"maximize": True}, {"lr": 0.01}):
        found = []
        for apply in ("step", "backward"):
            model = network()
            optimizer = rkfac.RSKFAC(model, params=groups(model, **own), apply=apply, momentum=0.9, **EVERY)
            found.append(train(model, optimizer))
        assert_same(found[1], found[0], 1e-10)
    plain, natural = (train(*made, one_pass=penalised) for made in pair({"momentum": 0.9}))
    assert_same(natural, plain, 1e-10)
    found = []
    for model, optimizer in pair({"momentum": 0.9}):
        for x, y in batches(6):
            optimizer.zero_grad()
            plain_pass(model, x, y)
            optimizer.step()
            optimizer.step()
        found.append([flat(model)])
    assert_same(found[1], found[0], 1e-10)


def test_other_tensors_in_the_parameters_place_get_their_own_gradients() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x, y = next(batches(1))
    F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y).backward()
    assert all(t.grad is not None for t in fast.values())
    assert all(p.grad is None for p in model.parameters())


def test_of_two_optimizers_the_later_one_decides() -> None:
    model = network()
    first = rkfac.RSKFAC(model, apply="backward", **EVERY)
    train(model, first, 3)
    later = rkfac.RSKFAC(model, apply="step", **EVERY)
    x, y = next(batches(1))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.zero_grad()
        plain_pass(one, x, y)
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad, rtol=0, atol=0)
    later.close()
    first.close()


def test_a_bias_frozen_on_the_way_is_refused_by_the_layers_name() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, apply="backward", **EVERY)
    train(model, optimizer, 3)
    model[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="bias of layer '0' was frozen or unfrozen"):
        model(next(batches(1))[0])


def test_a_basis_that_changes_its_precision_carries_the_momentum_over() -> None:
    found = []
    for model, optimizer in pair({"momentum": 0.9, "damping": 0.01, "rank": 32}, torch.float32):
        found.append(train(model, optimizer, 9, dtype=torch.float32))
    assert_same(found[1], found[0], 1e-3)


@pytest.mark.parametrize("scale", [1e-20, 1e-18, 1e12])
def test_gradients_of_any_size_take_the_same_steps_in_float32(scale: float) -> None:
    found = []
    for model, optimizer in pair({"graft": None, "momentum": 0.0, "lr": 1e-3, "damping": 0.3}, torch.float32):
        optimizer.param_groups[0]["lr"] = 1e-3 * scale  # the natural gradient of a scaled loss is smaller by the scale
        seen = train(model, optimizer, 5, lambda m, x, y: (F.cross_entropy(m(x), y) * scale).backward(), torch.float32)
        assert flat(model).isfinite().all()
        found.append(seen)
    assert_same(found[1], found[0], 1e-4)


@pytest.mark.parametrize("member", [rkfac.RSKFAC, rkfac.BKFAC])
def test_a_weight_thawed_after_its_bias_takes_the_steps_of_the_other_way(member: type[rkfac.KFAC]) -> None:
    """The bias's momentum is then a part of what both are preconditioned by together."""
    seen = []
    for apply in ("step", "backward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 30)).double()
        model[2].weight.requires_grad_(False)
        optimizer = member(model, lr=0.01, rank=4, apply=apply)  # type: ignore[arg-type]
        generator, steps = torch.Generator().manual_seed(1), []
        for k in range(10):
            if k == 5:
                model[2].weight.requires_grad_(True)
            x = torch.randn(6, 30, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            steps.append(flat(model))
        seen.append(steps)
    assert_same(*seen, 1e-12)

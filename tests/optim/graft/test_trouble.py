"""Layers without a basis, gradients that are not finite and errors half-way: what the others do, what is kept."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.graft.by_hand import Watched, cosine, joined
from optim.numbers.injections import assert_finite
from optim.problems import assert_moved, mlp, parameters, reader, rows, same, sentences, step, train, twin
from rkfac import linalg
from rkfac.linalg import lapack
from rkfac.optim.rules import square_of

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "damping": 0.05, "relative_to": "mean"}
TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
NUMBERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
}
each_graft = pytest.mark.parametrize("graft", TORCH)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, layer: str) -> Iterator[None]:
    """Solvers give up on one layer."""
    exact, inverted = linalg.eigh, lapack.definite_inverse

    def eigh(X: Tensor, *rest: Any, name: str = "", **keywords: Any) -> Any:
        if f"factor of {layer!r}" in name:
            raise linalg.DecompositionError(f"{name} did not converge")
        return exact(X, *rest, name=name, **keywords)

    def inverse(C: Tensor, name: str) -> Tensor | None:
        return None if f"factor of {layer!r}" in name else inverted(C, name)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(linalg, "eigh", eigh)
        patch.setattr(lapack, "definite_inverse", inverse)
        yield


@each_graft
def test_a_layer_without_a_basis_takes_torchs_step_and_later_one_of_its_length(
    graft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = stated.KFAC(
        model, lr=0.05, graft=graft, max_failures=100, fallback_scale=0.3, **NUMBERS[graft], **EVERY
    )
    shadow = [nn.Parameter(p.detach().clone()) for p in model[2].parameters()]
    plain = TORCH[graft](shadow, lr=0.05, **NUMBERS[graft])
    start = parameters(model)
    watched = Watched(model, optimizer, graft, NUMBERS[graft])

    def together() -> None:
        watched.step(rows(), 0.05)
        for mine, p in zip(shadow, model[2].parameters(), strict=True):
            mine.grad = p.grad.clone()
        plain.step()

    with failing(monkeypatch, "2"):
        for _ in range(4):
            together()
            assert all(torch.equal(mine, p) for mine, p in zip(shadow, model[2].parameters(), strict=True))
            assert cosine(joined(watched.moved, ["0.weight"]), joined(watched.plain, ["0.weight"])) < 0.99
    (record,) = [r for r in optimizer.report() if r.name == "2"]
    assert record.failures == 4
    assert_moved(model, start)
    for _ in range(3):  # the buffers of the wait go on
        together()
        for names in watched.layers().values():
            length = float(joined(watched.plain, names).norm())
            assert float(joined(watched.moved, names).norm()) == pytest.approx(length, rel=1e-8)
    assert cosine(joined(watched.moved, ["2.weight"]), joined(watched.plain, ["2.weight"])) < 0.99


@each_graft
def test_a_layer_whose_later_decompositions_fail_keeps_its_basis_and_its_length(
    graft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.05, graft=graft, max_failures=100, **NUMBERS[graft], **EVERY)
    watched = Watched(model, optimizer, graft, NUMBERS[graft])
    watched.step(rows(), 0.05)
    with failing(monkeypatch, "2"):
        for _ in range(4):
            watched.step(rows(), 0.05)
            for names in watched.layers().values():
                length = float(joined(watched.plain, names).norm())
                assert float(joined(watched.moved, names).norm()) == pytest.approx(length, rel=1e-8)


@each_graft
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["hidden.weight", "norm.bias", "embedding.weight"])
def test_a_gradient_that_is_not_finite_costs_its_layer_one_step(graft: Any, value: float, name: str) -> None:
    model = reader()
    other = twin(model)
    settings = {"lr": 0.05, "graft": graft, **NUMBERS[graft], "weight_decay": 0.0, **EVERY}
    optimizer, healthy = stated.KFAC(model, **settings), stated.KFAC(other, **settings)
    watched = Watched(model, optimizer, graft, {k: v for k, v in NUMBERS[graft].items() if k != "weight_decay"})
    layer = name.split(".")[0]
    batches = [sentences() for _ in range(4)]
    for batch in batches[:2]:
        watched.step(batch, 0.05)
        step(other, healthy, batch)
    for m, o in ((model, optimizer), (other, healthy)):
        o.zero_grad()
        F.cross_entropy(m(batches[2][0]), batches[2][1]).backward()
    spoiled = model.get_parameter(name)
    spoiled.grad.view(-1)[0] = value
    start = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    with pytest.warns(UserWarning, match=f"left out for '{layer}'"):
        optimizer.step()
    healthy.step()
    for key, p in parameters(model).items():
        expected = start[key] if key.startswith(layer) else parameters(other)[key]
        assert torch.equal(p, expected), key
    assert_finite(model, optimizer)
    # The buffers went on as with a gradient of zero, and the next step is of the rule's length again.
    for p in model.get_submodule(layer).parameters():
        p.grad.zero_()
    watched.observe(start, 0.05)
    watched.step(batches[3], 0.05)
    for names in watched.layers().values():
        length = float(joined(watched.plain, names).norm())
        assert float(joined(watched.moved, names).norm()) == pytest.approx(length, rel=1e-8)


@each_graft
def test_an_error_in_the_last_direction_of_the_first_step_leaves_everything_and_a_state_that_loads(
    graft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.05, graft=graft, **NUMBERS[graft], **EVERY)
    batch = rows()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    start = parameters(model)

    def broken(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._blocks["4"], "direction", broken)
        with pytest.raises(MemoryError, match="no room"):
            optimizer.step()
    assert same(parameters(model), start)
    for buffers in optimizer.state.values():
        for key, value in buffers.items():
            assert not torch.as_tensor(value).any(), f"{key} moved"
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = twin(model)
    resumed = stated.KFAC(other, lr=0.05, graft=graft, **NUMBERS[graft], **EVERY)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    batches = [rows() for _ in range(2)]
    train(model, optimizer, batches)
    train(other, resumed, batches)
    assert_moved(model, start)


@each_graft
def test_a_resumed_run_is_the_same_run_bit_for_bit(graft: Any) -> None:
    settings = {**EVERY, "inverse_every": 3, "weight_decay_from": 2, "rank": 3, **NUMBERS[graft]}
    model, batches = reader(torch.float32), [sentences() for _ in range(9)]
    optimizer = stated.RSKFAC(model, lr=0.05, graft=graft, **settings)
    train(model, optimizer, batches[:4])
    if graft == "sgd":
        (share,) = {buffers["decay_share"] for buffers in optimizer.state.values()}
        assert share == pytest.approx(0.9 * 0.1 + 0.1)  # of the steps 2 and 3
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    model_state, state = torch.load(file, weights_only=True)
    fresh = reader(torch.float32)
    fresh.load_state_dict(model_state)
    resumed = stated.RSKFAC(fresh, lr=0.9, graft=graft, **{**settings, "weight_decay": 0.7})
    resumed.load_state_dict(state)
    assert same(resumed.state_dict(), optimizer.state_dict())
    for batch in batches[4:]:
        assert step(fresh, resumed, batch) == step(model, optimizer, batch)
    assert same(parameters(fresh), parameters(model))
    assert same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("saved", ["sgd", "adamw", None])
@pytest.mark.parametrize("here", ["sgd", "adamw", None])
def test_a_state_of_one_graft_is_refused_by_another_by_name(saved: Any, here: Any) -> None:
    model = mlp()
    first, second = (stated.KFAC(m, graft=g, fallback="sgd", **EVERY) for m, g in ((model, saved), (twin(model), here)))
    step(model, first, rows())
    state, before = copy.deepcopy(first.state_dict()), copy.deepcopy(second.state_dict())
    if saved == here:
        second.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=f"graft: {saved} saved, {here} here"):
        second.load_state_dict(state)
    assert same(second.state_dict(), before)


def test_half_of_sgds_memory_is_refused() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, momentum=0.9, weight_decay=0.1, **EVERY)
    step(model, optimizer, rows())
    for key in ("decay_share", "momentum_buffer"):
        state = copy.deepcopy(optimizer.state_dict())
        del state["state"][0][key]
        with pytest.raises(ValueError, match=r"the saved buffers of a parameter of shape \(8, 6\)"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_the_kl_clip_bounds_the_step_that_is_taken(scale: float) -> None:
    """d^T (F + damping) d of the real step, whatever the loss is multiplied by."""
    torch.manual_seed(0)
    model, (x, y) = mlp(), rows()
    settings = {"lr": 1.0, "momentum": 0.0, "kl_clip": 1e-3, "factor_every": 1, "inverse_every": 1}
    optimizer = stated.KFAC(model, **settings)
    before = [p.detach().clone() for p in model.parameters()]
    (scale * F.cross_entropy(model(x), y)).backward()
    optimizer.step()
    moved = iter([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    total = 0.0
    for block in optimizer._blocks.values():
        change = tuple(next(moved) for _ in block.parameters)
        curved = block.multiply(change, optimizer.param_groups[0])
        total += sum(float((a * b).sum()) for a, b in zip(change, curved, strict=True))
    assert total <= 1e-3 * (1 + 1e-6)


def test_adamws_numbers_without_its_graft_are_refused() -> None:
    with pytest.raises(ValueError, match="graft='adamw'"):
        rkfac.RSKFAC(mlp(), lr=3e-3, betas=(0.9, 0.95))


def test_a_waiting_layer_keeps_its_clip_with_momentum() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=1.0, momentum=0.9, update_clip=0.01)
    optimizer.close()  # no statistics, so no basis
    for _ in range(6):
        before = parameters(model)
        step(model, optimizer, rows())
        for name, value in parameters(model).items():
            rms = float((value - before[name]).square().mean().sqrt())
            assert rms <= 0.01 * (1 + 1e-6), name


def test_a_length_is_not_rounded_to_sixteen_bits() -> None:
    vector = torch.full((1000,), 0.1, dtype=torch.bfloat16)
    exact = float(vector.double().square().sum())
    assert float(square_of(vector)) == pytest.approx(exact, rel=1e-5)

"""The gate on devices that are not a CPU: nothing waits for the device, and refusals are told later."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from optim import stated
from optim.numbers.injections import TARGET, UPDATES, assert_finite, injected
from optim.problems import parameters, reader, sentences, step, twin
from rkfac.curvature.block import Direction
from rkfac.linalg import Whole, host, kronecker, measured
from rkfac.optim import clip as clips
from rkfac.optim import directing, gate, planning
from rkfac.optim.gate import Gate, bounded, moderate
from rkfac.optim.rules import base as rules


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rooms believe that reading a value would wait for a device; the tensors stay where they are."""
    for room in (host, kronecker, measured, gate, planning, directing, rules):
        monkeypatch.setattr(room, "at_once", lambda tensor: False)


def direction_of(parts: tuple[Tensor, ...], number: Tensor) -> Direction:
    return Direction(tuple(Whole(part) for part in parts), number, 15, lambda: number, number, lambda: number)


def test_the_pure_parts_run_where_no_value_can_be_read() -> None:
    """A meta tensor has no values: whatever looked at one would raise."""
    parts = (torch.empty(3, 4, device="meta"), torch.empty(3, device="meta"))
    direction = direction_of(parts, torch.empty((), dtype=torch.float64, device="meta"))
    clip = clips.rms_clip(direction.norm, direction.size, 0.07)
    assert clip is not None
    passed = Gate(3).passes("layer", bounded(direction.norm * clip, torch.float32))
    assert isinstance(passed, Tensor)
    masked = direction.masked(passed)
    for index, part in enumerate(parts):
        masked.add_to(index, part, clip)
    clips.kl_clip([direction.inner], 0.1)
    moderate(parts[0], squared=True)


def test_masking_turns_anything_into_zero() -> None:
    for value in (math.nan, math.inf, 1.0):
        parts = (torch.full((2, 2), value),)
        direction = direction_of(parts, torch.tensor(value, dtype=torch.float64)).masked(torch.tensor(False))
        target = torch.ones(2, 2)
        direction.add_to(0, target, 0.5)
        assert torch.equal(target, torch.ones(2, 2))
        assert float(direction.norm) == 0


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("graft, fallback", [("sgd", "adamw"), ("adamw", "sgd"), (None, "adamw")])
def test_a_step_without_statistics_reads_nothing_from_the_device(
    graft: Any, fallback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reader(torch.float32)
    optimizer = stated.RSKFAC(
        model, lr=0.1, graft=graft, momentum=0.9, fallback=fallback, factor_every=10, inverse_every=10, rank=3
    )
    step(model, optimizer, sentences())
    start = parameters(model)
    optimizer.zero_grad()
    x, y = sentences()
    torch.nn.functional.cross_entropy(model(x), y).backward()

    def refuse(*_: Any) -> Any:
        raise AssertionError("a value was read from the device")

    with monkeypatch.context() as patch:
        for name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "cpu", "nonzero"):
            patch.setattr(Tensor, name, refuse)
        optimizer.step()
    assert all(not torch.equal(p, start[name]) for name, p in parameters(model).items())


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("stage", UPDATES)
def test_a_refused_update_becomes_zero_and_is_named_at_the_next_statistics(stage: str) -> None:
    model = reader(torch.float32)
    other = twin(model)
    optimizer, healthy = (
        stated.RSKFAC(m, factor_every=1, inverse_every=1, rank=3, update_clip=0.07) for m in (model, other)
    )
    batches = [sentences() for _ in range(3)]
    for m, o in ((model, optimizer), (other, healthy)):
        step(m, o, batches[0])
    start = parameters(model)
    with injected(UPDATES[stage], optimizer):
        step(model, optimizer, batches[1])
    step(other, healthy, batches[1])
    for name, value in parameters(model).items():
        assert torch.equal(value, start[name] if name.startswith(TARGET) else parameters(other)[name]), name
    with pytest.warns(UserWarning, match=TARGET):
        step(model, optimizer, batches[2])
    assert_finite(model, optimizer)


@pytest.mark.usefixtures("_elsewhere")
def test_a_refusal_between_two_statistics_is_named_even_if_the_next_update_was_healthy() -> None:
    model = reader(torch.float32)
    optimizer = stated.RSKFAC(model, factor_every=4, inverse_every=4, rank=3)
    step(model, optimizer, sentences())
    with injected(UPDATES["direction nan"], optimizer):
        step(model, optimizer, sentences())
    step(model, optimizer, sentences())
    step(model, optimizer, sentences())
    with pytest.warns(UserWarning, match=TARGET):
        step(model, optimizer, sentences())


@pytest.mark.usefixtures("_elsewhere")
def test_refusals_in_a_row_are_one_error_after_which_training_goes_on() -> None:
    model = reader(torch.float32)
    optimizer = stated.RSKFAC(model, factor_every=1, inverse_every=1, rank=3, max_failures=2)
    step(model, optimizer, sentences())
    with injected(UPDATES["direction nan"], optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, optimizer, sentences())
        step(model, optimizer, sentences())
        start = parameters(model)
        with pytest.raises(RuntimeError, match=rf"'{TARGET}'.*2 times in a row"):
            step(model, optimizer, sentences())
    assert all(torch.equal(p, start[name]) for name, p in parameters(model).items())
    step(model, optimizer, sentences())
    assert_finite(model, optimizer)
    assert all(not torch.equal(p, start[name]) for name, p in parameters(model).items())

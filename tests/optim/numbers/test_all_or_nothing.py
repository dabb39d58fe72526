"""A step is taken as a whole or not at all, and blocks without any curvature are no reason to fail."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import stated
from optim.numbers.injections import assert_finite, block_of
from optim.problems import assert_moved, parameters, reader, same, sentences, step
from rkfac.optim import clip as clips
from rkfac.optim import planning
from rkfac.optim.rules import GRAFTS

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_absolute_damping_carries_norm_layers_without_curvature(norm: type[nn.Module], rule: Any) -> None:
    """A unit that is multiplied by zero afterwards has no gradient: its block is exactly zero, with a tiny damping."""
    model = nn.Sequential(nn.Linear(6, 8), norm(8), nn.Linear(8, 4))
    with torch.no_grad():
        model[2].weight[:, :3] = 0.0
    optimizer = stated.RSKFAC(
        model, damping=1e-9, relative_to=None, damping_rule=rule, factor_start="unbiased", **EVERY
    )
    x, y = torch.randn(1 if norm is nn.LayerNorm else 12, 6), torch.randint(4, (12,))
    y = y[: len(x)]  # one sample makes every block of two singular
    start = parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(model, optimizer, (x, y))
    assert_finite(model, optimizer)
    assert_moved(model, start)


@pytest.mark.parametrize("graft", GRAFTS, ids=str)
@pytest.mark.parametrize("place", ["direction", "clip", "refresh", "course", "courses", "prepare"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.linalg.LinAlgError])
def test_an_error_in_the_middle_of_a_step_moves_nothing(
    place: str, graft: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(reader(torch.float32), nn.BatchNorm1d(4))
    optimizer = stated.RSKFAC(
        model,
        lr=0.1,
        graft=graft,
        momentum=None if graft == "adamw" else 0.9,
        weight_decay=0.1,
        update_clip=1.0,
        kl_clip=1.0,
        rank=3,
        **EVERY,
    )
    step(model, optimizer, sentences())
    batch = sentences()
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    start, buffers = parameters(model), [b.clone() for b in model.buffers()]
    held = copy.deepcopy(optimizer.state_dict()["state"])
    block, calls = block_of(optimizer, "0.head"), []

    def broken(*_: Any, **__: Any) -> Any:
        raise error("the third layer does not like it")

    def third(*args: Any) -> Any:
        calls.append(args)
        return broken() if len(calls) == 3 else genuine(*args)

    with monkeypatch.context() as patch:
        if place == "courses":
            patch.setattr(GRAFTS[graft], place, broken)
        elif place in ("clip", "course", "prepare"):
            where, name = (clips, "rms_clip") if place == "clip" else (GRAFTS[graft], place)
            genuine = getattr(where, name)
            patch.setattr(where, name, third)
            if place == "course":
                patch.setattr(planning, "SMALL", 0)  # courses of small layers are made together
        else:
            patch.setattr(block, "direction" if place == "direction" else "decompose", broken)
        with pytest.raises(error, match="does not like it"):
            optimizer.step()
    assert same(parameters(model), start)
    assert all(torch.equal(b, old) for b, old in zip(model.buffers(), buffers, strict=True))
    assert same(optimizer.state_dict()["state"], held)
    optimizer.step()  # the same gradients again
    assert_moved(model, start)
    assert_finite(model, optimizer)

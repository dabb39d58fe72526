"""A model whose precision changes after the optimizer was built: the factors follow or stay precise enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optim import stated
from optim.problems import assert_moved, averages, convnet, images, mlp, parameters, rows, step, train, twin

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "momentum": 0.0}


@pytest.mark.parametrize("make, draw", [(mlp, rows), (convnet, images)], ids=["rows", "images"])
@pytest.mark.parametrize("when", ["before the first step", "after two steps"])
def test_a_model_turned_to_double_trains_as_one_born_so(make: Any, draw: Any, when: str) -> None:
    model = make(dtype=torch.float32)
    born = twin(model).double()
    optimizer, reference = stated.KFAC(model, **EVERY), stated.KFAC(born, **EVERY)
    batches = [draw() for _ in range(4)]
    early = 0 if when.startswith("before") else 2
    train(model, optimizer, [(x.float(), y) for x, y in batches[:early]])
    train(born, reference, batches[:early])
    model.double()
    start = parameters(model)
    train(model, optimizer, batches[early:])
    train(born, reference, batches[early:])
    assert_moved(model, start)
    for name, value in parameters(model).items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, parameters(born)[name], rtol=1e-3, atol=1e-3)


def test_a_model_turned_to_bfloat16_keeps_float32_statistics() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = stated.KFAC(model, lr=0.0, **EVERY)
    model.bfloat16()
    other = twin(model)
    born = stated.KFAC(other, lr=0.0, **EVERY)
    x, y = rows(dtype=torch.bfloat16)
    step(model, optimizer, (x, y))
    step(other, born, (x, y))
    for name, value in averages(optimizer).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, averages(born)[name])


def test_parameters_replaced_behind_the_optimizers_back_are_left_alone() -> None:
    """As with torch's own optimizers: what was never handed over is not trained, and the rest goes on."""
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows()])
    model[2].weight = torch.nn.Parameter(torch.randn_like(model[2].weight))
    start = parameters(model)
    train(model, optimizer, [rows()])
    stayed = {name for name, value in parameters(model).items() if torch.equal(value, start[name])}
    assert stayed == {"2.weight"}

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rkfac
from optim.enrolled import OPTIMIZERS
from optim.problems import (
    assert_same_averages,
    assert_same_parameters,
    mlp,
    reader,
    rows,
    sentences,
    train,
    twin,
    updates,
)

Build = Callable[..., rkfac.KFAC]
EVERY: dict[str, Any] = {"factor_every": 2, "inverse_every": 3}


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compared(build: Build, backend: str, order: str, fisher: str = "empirical") -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(5)]
    plain = build(model, fisher=fisher, **EVERY)
    if order == "model first":
        running: Any = torch.compile(other, backend=backend)
        optimizer = build(running, fisher=fisher, **EVERY)
    elif order == "optimizer first":
        optimizer = build(other, fisher=fisher, **EVERY)
        running = torch.compile(other, backend=backend)
    elif order == "in place":
        optimizer = build(other, fisher=fisher, **EVERY)
        other.compile(backend=backend)
        running = other
    else:  # "after a forward": the graph exists before the hooks do
        running = torch.compile(other, backend=backend)
        running(batches[0][0]).sum().backward()
        optimizer = build(running, fisher=fisher, **EVERY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(running, optimizer, batches)
    train(model, plain, batches)
    assert_same_averages(optimizer, plain)
    assert_same_parameters(running, model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_compiled_model_equals_the_eager_one(build: Build, order: str) -> None:
    compared(build, "eager", order)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "in place", "after a forward"])
def test_every_order_of_compiling_and_building(order: str, fisher: str) -> None:
    """The hooks are the same for every optimizer, so one stands for all where compiling is slow."""
    compared(OPTIMIZERS["RSKFAC"], "aot_eager", order, fisher)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("make, draw", [(mlp, rows), (reader, sentences)], ids=["loop", "straight"])
def test_a_graph_first_traced_on_a_step_without_statistics(make: Any, draw: Any, fisher: str) -> None:
    """As after a resume: the next statistics step must collect although the graph was traced without hooks."""
    build = OPTIMIZERS["RSKFAC"]
    model = make()
    optimizer = build(model, fisher=fisher, factor_every=3, inverse_every=3)
    train(model, optimizer, [draw()])
    other = twin(model)
    resumed = build(other, fisher=fisher, factor_every=3, inverse_every=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    running: Any = torch.compile(other, backend="eager")
    batches = [draw() for _ in range(7)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(running, resumed, batches)
    train(model, optimizer, batches)
    assert updates(resumed) == {3}
    assert_same_averages(resumed, optimizer)
    assert_same_parameters(running, model)


@pytest.mark.xfail(strict=True, reason="Dynamo gives up on the frames of a hooked module once a hook broke their graph")
def test_steps_without_statistics_run_unbroken() -> None:
    """Graphs break on statistics steps only: between them the whole forward is one graph."""
    model = reader()
    optimizer = rkfac.KFAC(model, factor_every=100, inverse_every=100)
    graphs = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    running: Any = torch.compile(model, backend=counting)
    train(running, optimizer, [sentences()])
    assert len(graphs) > 1
    graphs.clear()
    train(running, optimizer, [sentences() for _ in range(3)])
    assert len(graphs) == 1

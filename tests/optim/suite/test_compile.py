from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rkfac
from optim import stated
from optim.enrolled import OPTIMIZERS
from optim.problems import (
    assert_same_averages,
    assert_same_parameters,
    mlp,
    reader,
    rows,
    sentences,
    speaker,
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


def compared(
    build: Build, backend: str, order: str, fisher: str = "empirical", make: Any = mlp, draw: Any = rows
) -> None:
    model = make()
    other, batches = twin(model), [draw() for _ in range(5)]
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


def test_a_compiled_model_equals_the_eager_one(build: Build) -> None:
    compared(build, "eager", "model first")


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "in place", "after a forward"])
def test_every_order_of_compiling_and_building(order: str, fisher: str) -> None:
    """The hooks are the same for every optimizer, so one stands for all where compiling is slow."""
    compared(OPTIMIZERS["RSKFAC"], "aot_eager", order, fisher)


@pytest.mark.parametrize("order", ["model first", "optimizer first", "in place", "after a forward"])
def test_attention_and_tied_weights_in_every_order(order: str) -> None:
    compared(OPTIMIZERS["RSKFAC"], "aot_eager", order, make=speaker, draw=sentences)


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize(
    "make, draw", [(mlp, rows), (reader, sentences), (speaker, sentences)], ids=["loop", "straight", "attention"]
)
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


def graphs_of(make: Any, running_of: Any, fullgraph: bool, optimizer_sees_it: bool) -> tuple[int, int, rkfac.KFAC]:
    """How many graphs were traced by the first step, which collects statistics, and by the three after it."""
    model = make()
    graphs = []

    def counting(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if running_of == "wrapped":
        running: Any = torch.compile(model, backend=counting, fullgraph=fullgraph)
        optimizer = stated.KFAC(running if optimizer_sees_it else model, factor_every=100, inverse_every=100)
    else:
        model.compile(backend=counting, fullgraph=fullgraph)
        running = model
        optimizer = stated.KFAC(model, factor_every=100, inverse_every=100)
    train(running, optimizer, [sentences()])
    first = len(graphs)
    train(running, optimizer, [sentences() for _ in range(3)])
    return first, len(graphs) - first, optimizer


@pytest.mark.parametrize("way", ["wrapped", "in place"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("make", [reader, speaker])
def test_steps_without_statistics_run_one_unbroken_graph(make: Any, way: str, fullgraph: bool) -> None:
    """Statistics steps run without the graph, so that nothing is broken, skipped or traced again."""
    first, after, optimizer = graphs_of(make, way, fullgraph, True)
    assert (first, after) == (0, 1)
    assert updates(optimizer) == {1}


def test_a_graph_traced_before_the_optimizer_existed_does_no_harm() -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(4)]
    running: Any = torch.compile(other, backend="eager", fullgraph=True)
    running(batches[0][0]).sum().backward()
    other.zero_grad()
    optimizer, plain = stated.KFAC(running, **EVERY), stated.KFAC(model, **EVERY)
    train(running, optimizer, batches)
    train(model, plain, batches)
    assert_same_averages(optimizer, plain)
    assert_same_parameters(running, model)


def test_other_peoples_graphs_are_left_alone() -> None:
    traced = []

    def counting(graph: Any, example: Any) -> Any:
        traced.append(graph)
        return graph.forward

    theirs: Any = torch.compile(torch.nn.Linear(6, 2).double(), backend=counting)
    theirs(rows()[0])
    model = mlp()
    running: Any = torch.compile(model, backend="eager")
    train(running, stated.KFAC(running, **EVERY), [rows() for _ in range(3)])
    theirs(rows()[0])
    assert len(traced) == 1


def test_layers_that_nobody_sees_are_named_loudly() -> None:
    """The optimizer got the plain model, and a graph of it was traced before: its hooks never run."""
    model = mlp()
    running: Any = torch.compile(model, backend="eager")
    running(rows()[0]).sum().backward()
    model.zero_grad()
    optimizer = stated.KFAC(model, factor_every=3, inverse_every=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(running, optimizer, [rows() for _ in range(2)])
    with pytest.warns(UserWarning, match=r"'0', '2', '4'.*compiled model to the optimizer"):
        train(running, optimizer, [rows()])
    assert all("no call of it was seen" in record.reason for record in optimizer.report())


def test_regions_that_were_compiled_alone_are_seen() -> None:
    model, other = mlp(), None
    other = twin(model)
    other[2] = torch.compile(other[2], backend="eager", fullgraph=True)  # type: ignore[index]
    batches = [rows() for _ in range(4)]
    optimizer, plain = stated.KFAC(other, **EVERY), stated.KFAC(model, **EVERY)
    train(other, optimizer, batches)
    train(model, plain, batches)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert updates(optimizer) == {2}

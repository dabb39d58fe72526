"""Compiled models: statistics steps run eagerly, all others as one graph, and nobody's graphs are thrown away."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optim import stated
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


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts graphs and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("in_place", [False, True])
def test_fullgraph_works_and_steps_without_statistics_are_one_graph(in_place: bool, fisher: str) -> None:
    counting, plain = Counting(), reader()
    other = twin(plain)
    settings: dict[str, Any] = {"fisher": fisher, "factor_every": 3, "inverse_every": 3}
    if in_place:
        other.compile(backend=counting, fullgraph=True)
        running: Any = other
    else:
        running = torch.compile(other, backend=counting, fullgraph=True)
    optimizer, reference = stated.KFAC(running, **settings), stated.KFAC(plain, **settings)
    batches = [sentences() for _ in range(7)]
    train(running, optimizer, batches)
    train(plain, reference, batches)
    assert (counting.graphs, counting.calls) == (1, 4)  # steps 0, 3 and 6 collect
    assert updates(optimizer) == {3}
    assert_same_averages(optimizer, reference)
    assert_same_parameters(running, plain)


def test_a_graph_traced_before_the_optimizer_is_left_whole_and_still_observed() -> None:
    counting, model = Counting(), mlp()
    running = torch.compile(model, backend=counting)
    running(rows()[0]).sum().backward()
    before = counting.graphs
    optimizer = stated.KFAC(running, factor_every=1, inverse_every=1)
    train(running, optimizer, [rows() for _ in range(3)])
    assert counting.graphs == before
    assert updates(optimizer) == {3}


def test_graphs_of_other_people_stay_compiled() -> None:
    counting = Counting()
    stranger = torch.compile(mlp(), backend=counting)
    x = rows()[0]
    stranger(x)
    model = mlp()
    optimizer = stated.KFAC(torch.compile(model, backend="eager"), factor_every=2, inverse_every=2)
    train(model, optimizer, [rows() for _ in range(3)])
    optimizer.close()
    graphs = counting.graphs
    stranger(x)
    assert (counting.graphs, counting.calls) == (graphs, 2)


def test_a_plain_model_s_old_graph_is_said_loudly_after_one_period() -> None:
    model = mlp()
    running = torch.compile(model, backend="eager")
    running(rows()[0]).sum().backward()  # traced without hooks
    optimizer = stated.KFAC(model, factor_every=4, inverse_every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(running, optimizer, [rows() for _ in range(3)])
    assert updates(optimizer) == {0}
    with pytest.warns(UserWarning, match="compiled before the optimizer was built"):
        train(running, optimizer, [rows()])
    assert all("no call of it was seen" in record.reason for record in optimizer.report())


def test_an_exception_in_a_compiled_forward_does_not_leave_dynamo_forced_to_be_eager() -> None:
    counting = Counting()

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Any) -> Any:
            return self.net(x)

    model = Fragile()
    running = torch.compile(model, backend=counting)
    optimizer = stated.KFAC(running, factor_every=1, inverse_every=1)
    with pytest.raises(RuntimeError):
        running(torch.randn(3, 5).double())  # on a statistics step
    stranger = torch.compile(mlp(), backend=counting)
    stranger(rows()[0])
    assert counting.calls == 1
    train(running, optimizer, [rows()])
    assert updates(optimizer) == {1}


def test_an_interrupt_in_a_compiled_forward_does_not_leave_dynamo_forced_to_be_eager() -> None:
    """Ctrl-C in a notebook: KeyboardInterrupt is no Exception, so hooks with always_call do not run."""
    counting, model = Counting(), mlp()
    running = torch.compile(model, backend=counting)
    optimizer = stated.KFAC(running, factor_every=1, inverse_every=1)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[0].register_forward_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            running(rows()[0])
        handle.remove()
        torch.compile(mlp(), backend=counting)(rows()[0])
        assert counting.calls == 1
    finally:
        torch.compiler.set_stance("default")  # so that a failure here is nobody else's
        optimizer.close()


def test_inference_between_steps_uses_the_graph() -> None:
    counting, model = Counting(), mlp()
    running = torch.compile(model, backend=counting)
    optimizer = stated.KFAC(running, factor_every=1, inverse_every=1)
    with torch.no_grad():
        running(rows()[0])
    assert counting.calls == 1
    train(running, optimizer, [rows()])
    assert updates(optimizer) == {1}


def test_a_compiled_part_of_a_model_is_observed() -> None:
    plain = nn.Sequential(mlp(), nn.Linear(4, 4).double())
    other = twin(plain)
    other[0] = torch.compile(other[0], backend="eager", fullgraph=True)
    optimizer = stated.KFAC(other, factor_every=2, inverse_every=2)
    reference = stated.KFAC(plain, factor_every=2, inverse_every=2)
    batches = [rows() for _ in range(4)]
    train(other, optimizer, batches)
    train(plain, reference, batches)
    assert updates(optimizer) == {2}
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_around_model_and_loss_is_observed_or_said(backend: str) -> None:
    """torch.compile(lambda: loss): Dynamo sees the hooks while tracing; whatever happens must not be silent."""
    model = mlp()
    optimizer = stated.KFAC(model, factor_every=2, inverse_every=2)

    def whole(x: Any, y: Any) -> Any:
        return F.cross_entropy(model(x), y)

    compiled = torch.compile(whole, backend=backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in (rows() for _ in range(5)):
            optimizer.zero_grad()
            compiled(x, y).backward()
            optimizer.step()
    observed = updates(optimizer) == {3}
    assert observed or any("no call of theirs was seen" in str(w.message) for w in said)

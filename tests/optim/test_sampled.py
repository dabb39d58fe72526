"""fisher="mc": the ordinary loop collects, and nothing but the factors shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.problems import (
    assert_same_averages,
    assert_same_parameters,
    averages,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    step,
    train,
    twin,
    updates,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "fisher": "mc"}


class Wrapped(nn.Module):
    """Returns its logits in a dictionary, as many models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


@pytest.mark.parametrize("order", ["zero, forward, backward", "forward, zero, backward", "closure"])
def test_the_unchanged_loop_collects_once_a_step(order: str) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    for x, y in (rows() for _ in range(3)):
        if order == "closure":

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        if order.startswith("zero"):
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if order.startswith("forward"):
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert updates(optimizer) == {3}


@pytest.mark.parametrize("draw, make", [(rows, mlp), (sentences, reader)], ids=["rows", "text"])
def test_gradients_are_those_of_the_loss_alone(draw: Any, make: Any) -> None:
    model = make()
    other, (x, y) = twin(model), draw()
    optimizer = stated.KFAC(model, **EVERY)
    output = model(x)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(output, y).backward()
    F.cross_entropy(other(x), y).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    optimizer.step()


def test_labels_do_not_enter_the_factors() -> None:
    model = mlp()
    other, (x, y) = twin(model), rows()
    first, second = (stated.KFAC(m, lr=0.0, **EVERY) for m in (model, other))
    step(model, first, (x, y))
    step(other, second, (x, (y + 1) % 4))
    assert_same_averages(first, second, exactly=True)


def test_the_seed_decides_the_draw() -> None:
    model, batch = mlp(), rows()
    found = []
    for seed in (3, 3, 4):
        copied = twin(model)
        torch.manual_seed(len(found))  # the global state has no say
        optimizer = stated.KFAC(copied, seed=seed, **EVERY)
        step(copied, optimizer, batch)
        found.append(averages(optimizer)["4.output"])
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def test_drawing_leaves_the_global_generator_alone() -> None:
    model, batch = mlp(), rows()
    optimizer = stated.RSKFAC(model, rank=2, **EVERY)
    before = torch.get_rng_state()
    step(model, optimizer, batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_output_factor_is_the_second_moment_of_drawn_minus_expected_classes() -> None:
    """softmax - onehot, with the same generator drawing the classes."""
    model = nn.Sequential(nn.Linear(6, 4)).double()
    x, y = rows(9)
    source = torch.Generator().manual_seed(11)
    optimizer = stated.KFAC(model, lr=0.0, generator=source, factor_start="unbiased", **EVERY)
    step(model, optimizer, (x, y))
    p = model(x).softmax(-1).detach()
    drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(11)).squeeze(1)
    g = p - F.one_hot(drawn, 4)
    torch.testing.assert_close(averages(optimizer)["0.output"], g.mT @ g / 9)


def test_a_model_that_returns_a_dictionary_trains_with_sample_fisher() -> None:
    inner = mlp()
    model, plain = Wrapped(inner), twin(inner)
    optimizer, reference = stated.KFAC(model, **EVERY), stated.KFAC(plain, **EVERY)
    for x, y in (rows() for _ in range(3)):
        optimizer.zero_grad()
        logits = model(x)["logits"]
        optimizer.sample_fisher(logits)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        step(plain, reference, (x, y))
    assert_same_parameters(inner, plain, exactly=True)


class Answer:
    """As Hugging Face's models return: attributes, not a tensor."""

    def __init__(self, **values: Tensor) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: {"logits": y, "hidden": 2 * y},
        lambda y: {"scores": y},
        lambda y: (y, "a note"),
        lambda y: Answer(logits=y, hidden=2 * y),
    ],
    ids=["dictionary", "only tensor of a dictionary", "only tensor of a tuple", "attribute"],
)
def test_logits_are_found_in_what_models_return(wrap: Any) -> None:
    class Model(Wrapped):
        def forward(self, x: Tensor) -> Any:
            self.logits = self.inner(x)
            return wrap(self.logits)

    inner = mlp()
    model, plain = Model(inner), twin(inner)
    optimizer, reference = stated.KFAC(model, **EVERY), stated.KFAC(plain, **EVERY)
    for x, y in (rows() for _ in range(3)):
        optimizer.zero_grad()
        model(x)
        F.cross_entropy(model.logits, y).backward()
        optimizer.step()
        step(plain, reference, (x, y))
    assert updates(optimizer) == {3}
    assert_same_parameters(inner, plain, exactly=True)


def test_an_output_that_cannot_be_read_is_refused_and_says_what_to_call() -> None:
    class Two(Wrapped):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.inner(x)
            return {"one": y, "two": 2 * y}

    model = Two(mlp())
    optimizer = stated.KFAC(model, **EVERY)
    start, (x, y) = parameters(model), rows()
    F.cross_entropy(model(x)["one"], y).backward()
    with pytest.raises(TypeError, match=r"dict.*sample_fisher"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


def test_evaluating_a_model_that_returns_a_dictionary_is_no_reason_to_refuse() -> None:
    model = Wrapped(mlp())
    optimizer = stated.KFAC(model, **EVERY)
    model.eval()
    model(rows()[0])
    model.train()
    with torch.no_grad():
        model(rows()[0])
    optimizer.step()
    assert optimizer.state_dict()["curvature"]["step"] == 1


def test_sample_fisher_belongs_to_the_sampled_fisher() -> None:
    optimizer = stated.KFAC(mlp())
    with pytest.raises(RuntimeError, match="fisher='mc'"):
        optimizer.sample_fisher(torch.zeros(2, 4))


def test_an_output_with_ambiguous_classes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4)).double()
    optimizer = stated.KFAC(model, **EVERY)
    start = parameters(model)
    model(torch.randn(3, 5, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="class_dim"):
        optimizer.step()
    assert all(torch.equal(value, start[name]) for name, value in parameters(model).items())


def test_steps_without_statistics_draw_nothing() -> None:
    model = mlp()
    source = torch.Generator().manual_seed(1)
    optimizer = stated.KFAC(model, fisher="mc", factor_every=3, inverse_every=3, generator=source)
    train(model, optimizer, [rows()])
    drawn = source.get_state()
    train(model, optimizer, [rows() for _ in range(2)])
    assert torch.equal(source.get_state(), drawn)
    train(model, optimizer, [rows()])
    assert not torch.equal(source.get_state(), drawn)

"""N is taken from what is certain: neither the order of arguments nor that of dimensions rescales the factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.problems import assert_same_averages, assert_same_parameters, averages, mlp, rows, step, twin

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


class Tempered(nn.Module):
    """A scalar (or something longer than the batch) comes first."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, first: Any, x: Tensor) -> Tensor:
        return self.net(x)


class Tagger(nn.Module):
    """Tokens in either order of dimensions, a class a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.norm(self.embedding(tokens)))))


@pytest.mark.parametrize("fisher", ["empirical", "mc"])
@pytest.mark.parametrize("first", [torch.tensor(0.5), torch.zeros(1, 12), torch.zeros(77, 2), 3.0, [torch.zeros(5)]])
def test_the_first_argument_has_no_say(first: Any, fisher: str) -> None:
    net = mlp()
    model, reference, (x, y) = Tempered(net), twin(net), rows()
    optimizer, expected = (stated.KFAC(m, fisher=fisher, **EVERY) for m in (model, reference))
    optimizer.zero_grad()
    F.cross_entropy(model(first, x), y).backward()
    optimizer.step()
    step(reference, expected, (x, y))
    assert_same_parameters(net, reference)


@pytest.mark.parametrize("sizes", [(12, 5), (3, 20)])
@pytest.mark.parametrize("damping", [{}, {"relative_to": None, "damping": 0.1}])
def test_sequence_first_equals_batch_first(sizes: tuple[int, int], damping: dict[str, Any]) -> None:
    model = Tagger().double()
    other = twin(model)
    tokens, y = torch.randint(9, sizes), torch.randint(4, sizes)
    optimizer, reference = (stated.KFAC(m, **EVERY, **damping) for m in (model, other))
    F.cross_entropy(model(tokens).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    F.cross_entropy(other(tokens.T).flatten(0, 1), y.T.flatten()).backward()
    reference.step()
    assert_same_averages(optimizer, reference)
    assert_same_parameters(model, other)


def test_the_output_factor_of_a_mean_loss_is_that_of_its_samples() -> None:
    """G = mean of (softmax - onehot)(softmax - onehot)^T whatever came in first."""
    net = nn.Sequential(nn.Linear(6, 4)).double()
    model, (x, y) = Tempered(net), rows(9)
    optimizer = stated.KFAC(model, lr=0.0, factor_start="unbiased", **EVERY)
    F.cross_entropy(model(torch.tensor(2.0), x), y).backward()
    optimizer.step()
    g = net(x).softmax(-1).detach() - F.one_hot(y, 4)
    torch.testing.assert_close(averages(optimizer)["net.0.output"], g.mT @ g / 9)


@pytest.mark.parametrize("parts", [(12,), (7, 5), (1, 11), (4, 4, 4)])
def test_gradient_accumulation_over_uneven_parts_equals_the_whole_batch(parts: tuple[int, ...]) -> None:
    """Each part's loss is its share of the whole, as careful programs do it: N g is the same everywhere."""
    model = mlp()
    other, (x, y) = twin(model), rows(12)
    optimizer, reference = (stated.KFAC(m, lr=0.0, factor_start="unbiased", **EVERY) for m in (model, other))
    for a, b in zip(x.split(parts), y.split(parts), strict=True):
        (F.cross_entropy(model(a), b, reduction="sum") / 12).backward()
    optimizer.step()
    step(other, reference, (x, y))
    assert_same_averages(optimizer, reference)


def test_a_loss_over_two_forwards_in_one_backward_equals_the_joined_batch() -> None:
    model = mlp()
    other, (x, y) = twin(model), rows(12)
    optimizer, reference = (stated.KFAC(m, lr=0.0, **EVERY) for m in (model, other))
    first, second = model(x[:5]), model(x[5:])
    F.cross_entropy(torch.cat([first, second]), y).backward()
    optimizer.step()
    step(other, reference, (x, y))
    assert_same_averages(optimizer, reference)


def test_eval_mode_training_collects_as_training_mode_does() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 4)).double().eval()
    optimizer = stated.KFAC(model, **EVERY)
    other = twin(model)
    step(model, optimizer, rows())
    assert {r.name: r.reason for r in optimizer.report()} == {"0": "", "1": "", "3": ""}
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert all(record.rank_output or record.kind == "BatchNorm1d" for record in optimizer.report())


# --- tokens


class Repeated(nn.Module):
    """One layer in the place of several: every token goes through it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class InParts(nn.Module):
    """A head that is given its tokens in two parts, as programs that save memory do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(part) for part in torch.tanh(self.layer(x)).split(3, 1)], 1)


class Recurrent(nn.Module):
    """A token a call, from its input to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(x[:, t] + h))
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


def traces_by_hand(model: nn.Module, name: str, loss: Any, terms: int) -> tuple[Tensor, Tensor]:
    """Of A = sum a a^T / (N S^2) and G = S / N sum g g^T over all calls of a layer, g of the summed loss."""
    calls: list[tuple[Tensor, Tensor]] = []

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((args[0].flatten(0, -2), output))

    handle = model.get_submodule(name).register_forward_hook(remember)
    value = loss()
    gradients = torch.autograd.grad(value, [output for _, output in calls])
    handle.remove()
    rows = sum(len(a) for a, _ in calls)
    inputs = sum(a.square().sum() for a, _ in calls) + rows  # and the bias's ones
    outputs = sum(g.square().sum() for g in gradients)
    return torch.as_tensor(inputs).detach() * terms / rows**2, torch.as_tensor(outputs) * rows / terms**2


@pytest.mark.parametrize("build", [Repeated, InParts, Recurrent])
@pytest.mark.parametrize("kind", [stated.KFAC, stated.EKFAC])
def test_a_token_is_one_term_of_the_loss_whatever_calls_it_is_in(build: Any, kind: Any) -> None:
    model = build().double()
    x, y = torch.randn(4, 6, 4).double(), torch.randint(3, (4, 6)).flatten()
    optimizer = kind(model, lr=0.0, factor_start="unbiased", loss_average="tokens", **EVERY)
    F.cross_entropy(model(x).flatten(0, 1), y).backward()
    optimizer.step()
    found = averages(optimizer)
    for name, _ in model.named_children():
        with optimizer.unhooked():
            expected = traces_by_hand(
                model, name, lambda: F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum"), 24
            )
        for side, trace in zip(("input", "output"), expected, strict=True):
            torch.testing.assert_close(torch.trace(found[f"{name}.{side}"]), trace)

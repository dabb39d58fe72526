"""Models beyond plain stacks: what is covered trains preconditioned, what is not is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    assert_same_averages,
    assert_same_parameters,
    convnet,
    images,
    mlp,
    parameters,
    rows,
    step,
    train,
    twin,
    updates,
)

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}
FISHERS = pytest.mark.parametrize("fisher", ["empirical", "mc"])


def covered(optimizer: rkfac.KFAC) -> dict[str, bool]:
    return {record.name: record.covered and not record.reason for record in optimizer.report()}


@FISHERS
def test_a_transformer_layer_of_torch_s_own(fisher: str) -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(40, 4)).double()
    start = parameters(model)
    optimizer = stated.RSKFAC(model, rank=3, fisher=fisher, **EVERY)
    train(model, optimizer, [(torch.randn(6, 5, 8).double(), torch.randint(4, (6,))) for _ in range(3)])
    assert covered(optimizer) == {
        "0.linear1": True,
        "0.linear2": True,
        "0.norm1": True,
        "0.norm2": True,
        "2": True,
        "0.self_attn": True,
        "0.self_attn.out_proj": True,
    }
    assert updates(optimizer) == {3}
    assert_moved(model, start)


class Adapted(nn.Module):
    """LoRA: a frozen base, two small trained matrices, the second starting at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@FISHERS
def test_lora_trains_its_adapters_and_leaves_the_base(fisher: str) -> None:
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(8, 4)).double()
    base = model[0].base.weight.clone()
    optimizer = stated.KFAC(model, fisher=fisher, **EVERY)
    train(model, optimizer, [rows() for _ in range(4)])
    assert covered(optimizer) == {"0.base": False, "0.down": True, "0.up": True, "2": True}
    frozen = next(record for record in optimizer.report() if record.name == "0.base")
    assert frozen.bytes == {"factors": 0, "basis": 0}
    assert torch.equal(model[0].base.weight, base)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


@FISHERS
def test_a_layer_called_three_times_in_a_forward_is_observed_once_a_step(fisher: str) -> None:
    model = Recurrent().double()
    optimizer = stated.KFAC(model, fisher=fisher, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    assert updates(optimizer) == {3}
    assert all(covered(optimizer).values())


class TiedLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))).mean(1))


@FISHERS
def test_a_tied_embedding_is_observed_and_moved_once_a_step(fisher: str) -> None:
    model = TiedLanguage().double()
    optimizer = stated.KFAC(model, lr=0.1, momentum=0.0, fisher=fisher, **EVERY)
    for _ in range(3):
        start = model.head.weight.detach().clone()
        step(model, optimizer, (torch.randint(9, (8, 5)), torch.randint(9, (8,))))
        # Under graft="sgd" the step is as long as SGD's: moved twice, it would be twice as long.
        length = torch.linalg.vector_norm(model.head.weight.detach() - start)
        torch.testing.assert_close(length, 0.1 * torch.linalg.vector_norm(model.head.weight.grad))
    assert covered(optimizer) == {"hidden": True, "embedding": True}
    assert updates(optimizer) == {3}


def test_an_lstm_trains_by_the_fallback_rule_and_its_head_is_covered() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    model = Reads()
    start = parameters(model)
    with pytest.warns(UserWarning, match="no adapter for LSTM"):
        optimizer = stated.RSKFAC(model, **EVERY)
    train(model, optimizer, [(torch.randn(4, 7, 6), torch.randint(4, (4,))) for _ in range(3)])
    assert covered(optimizer) == {"head": True, "lstm": False}
    assert_moved(model, start)


def test_channels_last_has_the_factors_and_steps_of_the_usual_layout() -> None:
    model = convnet()
    other = twin(model).to(memory_format=torch.channels_last)
    optimizer, reference = stated.KFAC(other, **EVERY), stated.KFAC(model, **EVERY)
    for x, y in (images() for _ in range(3)):
        step(other, optimizer, (x.to(memory_format=torch.channels_last), y))
        step(model, reference, (x, y))
    assert_same_averages(optimizer, reference)
    assert_same_parameters(other, model)


def test_groups_added_later_are_preconditioned_from_then_on() -> None:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = stated.KFAC(model, params=list(model[4].parameters()), **EVERY)
    train(model, optimizer, [rows()])
    optimizer.add_param_group({"params": [*model[0].parameters(), *model[2].parameters()], "lr": 0.01})
    before = parameters(model)
    train(model, optimizer, [rows() for _ in range(2)])
    assert covered(optimizer) == {"0": True, "2": True, "4": True}
    assert_moved(model, before)


def test_a_penalty_on_the_weights_inside_the_loss_of_the_usual_size_keeps_layers_covered() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = stated.KFAC(model, **EVERY)
    penalty = sum(p.square().sum() for p in model.parameters())
    (F.cross_entropy(model(x), y) + 2.5e-4 * penalty).backward()
    optimizer.step()
    assert all(covered(optimizer).values())


def test_a_layer_that_no_loss_reaches_says_so_and_the_others_train() -> None:
    model = mlp()
    model.add_module("unused", nn.Linear(4, 4).double())
    optimizer = stated.KFAC(model, **EVERY)
    for x, y in (rows() for _ in range(12)):
        optimizer.zero_grad()
        F.cross_entropy(model[:5](x), y).backward()
        optimizer.step()
    found = {record.name: record.reason for record in optimizer.report()}
    assert "no backward pass has reached its weight" in found.pop("unused")
    assert not any(found.values())


def test_only_layers_a_backward_reaches_collect() -> None:
    model, (x, y) = mlp(), rows()
    optimizer = stated.KFAC(model, **EVERY)
    F.cross_entropy(model(x), y).backward(inputs=[model[4].weight, model[2].bias])
    optimizer.step()
    blocks = optimizer.state_dict()["curvature"]["blocks"]
    assert {name: block["factors"]["input"]["updates"] for name, block in blocks.items()} == {"0": 0, "2": 0, "4": 1}

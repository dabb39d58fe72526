"""What is not preconditioned is said, with the true reason, and costs nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import rkfac
from optim import stated
from optim.problems import mlp, parameters, rows, step, train, twin

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


def reasons(optimizer: rkfac.KFAC) -> dict[str, str]:
    return {record.name: record.reason for record in optimizer.report() if not record.covered}


def tie(model: nn.Sequential) -> None:
    model.add_module("5", nn.Linear(6, 8).double())
    model[5].weight = model[0].weight


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


CHANGES = {
    "tied": (tie, "tied"),
    "pruned": (lambda m: prune.l1_unstructured(m[0], "weight", 0.5), "pruned"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m[0]), "parametrized"),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m[0]), "parametrized"),
    "replaced": (replace, "replaced"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("warm", [False, True], ids=["before any step", "after a step"])
def test_a_weight_changed_after_construction_retires_its_layer(change: str, warm: bool) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    if warm:
        step(model, optimizer, rows())
    (work, word), weight = CHANGES[change], model[0].weight
    work(model)

    def once() -> None:
        x, y = rows()
        optimizer.zero_grad()
        h = model[:5](x)
        F.cross_entropy(h, y).backward()
        optimizer.step()

    held = any(weight is p for p in model.parameters())
    what = (
        "trains by the fallback rule"
        if held
        else "is not preconditioned from now on: the model does not hold its weight"
    )
    assert held == (change not in ("replaced", "weight_norm"))
    with pytest.warns(UserWarning, match=f"layer '0' {what}"):
        once()
    assert word in reasons(optimizer)["0"]
    assert set(reasons(optimizer)) == {"0"} or change == "tied"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once()  # said once


def test_a_tied_weight_moves_once_by_its_fallback_step() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))

    model = Twice().double()
    optimizer = stated.KFAC(model, lr=0.1, **EVERY)
    model.two.weight = model.one.weight
    start = parameters(model)["one.weight"]
    with pytest.warns(UserWarning, match="fallback"):
        step(model, optimizer, rows())
    torch.testing.assert_close(model.one.weight.detach(), start - 0.1 * model.one.weight.grad)
    assert optimizer.report().trained == sum(p.numel() for p in model.parameters())  # none of them twice


class TiedByHand(nn.Module):
    """An output layer made of the embedding: F.linear(h, embedding.weight)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.hidden(self.embedding(tokens))).mean(1), self.embedding.weight)


def test_a_weight_used_by_hand_is_found_at_its_first_gradient() -> None:
    model = TiedByHand().double()
    optimizer = stated.KFAC(model, lr=0.1, **EVERY)
    start = parameters(model)["embedding.weight"]
    with pytest.warns(UserWarning, match="'embedding' trains by the fallback rule.*used by hand"):
        step(model, optimizer, (torch.randint(9, (8, 5)), torch.randint(9, (8,))))
    assert "used by hand" in reasons(optimizer)["embedding"]
    assert set(reasons(optimizer)) == {"embedding"}
    torch.testing.assert_close(model.embedding.weight.detach(), start - 0.1 * model.embedding.weight.grad)


def test_frozen_layers_cost_nothing_and_say_so() -> None:
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows() for _ in range(3)])
    record = next(r for r in optimizer.report() if r.name == "0")
    assert not record.covered
    assert "frozen" in record.reason
    assert record.bytes == {"factors": 0, "basis": 0}
    assert record.seconds["statistics"] == record.seconds["refresh"] == 0.0


def test_a_frozen_weight_with_a_trained_bias_is_not_reported_as_covered() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    optimizer = stated.KFAC(model, lr=0.1, **EVERY)
    start = parameters(model)
    step(model, optimizer, rows())
    record = next(r for r in optimizer.report() if r.name == "2")
    assert not record.covered
    assert "frozen" in record.reason
    assert torch.equal(model[2].weight, start["2.weight"])
    torch.testing.assert_close(model[2].bias.detach(), start["2.bias"] - 0.1 * model[2].bias.grad)


def test_a_layer_thawed_later_is_preconditioned_from_then_on() -> None:
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows()])
    for p in model[0].parameters():
        p.requires_grad_(True)
    train(model, optimizer, [rows() for _ in range(2)])
    assert not reasons(optimizer)
    assert all(record.bytes["basis"] for record in optimizer.report())


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_misspelt_pattern_is_refused(argument: str) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(6, 8))
    model.add_module("head", nn.Linear(8, 4))
    with pytest.raises(ValueError, match=f"{argument}='haed' matches no module"):
        stated.RSKFAC(model, **{argument: "haed"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stated.RSKFAC(model, **{argument: "head"}).close()
    stated.RSKFAC(model, exclude=("*Norm*", "Embedding")).close()  # kinds of layers this model has none of


@pytest.mark.parametrize("steps", [1, 5])
def test_complex_parameters_under_adamw_equal_torch_s(steps: int) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, 6, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex128) @ self.filter.T).abs()

    model = Waves()
    other = twin(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = stated.KFAC(model, lr=0.01, fallback="adamw", weight_decay=0.1)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1)
    for batch in (rows() for _ in range(steps)):
        step(model, optimizer, batch)
        step(other, reference, batch)
    torch.testing.assert_close(model.filter, other.filter, rtol=1e-10, atol=1e-12)


def test_one_warning_when_less_than_half_is_covered_names_the_largest_and_why() -> None:
    model = nn.Sequential(nn.LSTM(20, 30), nn.Bilinear(30, 30, 5), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match="are preconditioned") as said:
        stated.RSKFAC(model)
    assert len(said) == 1
    text = str(said[0].message)
    assert "only 18 of" in text
    assert text.index("'0' (") < text.index("'1' (")
    assert "no adapter for LSTM" in text
    assert "no adapter for Bilinear" in text
    assert said[0].filename == __file__


def test_no_warning_when_most_is_covered_or_frozen() -> None:
    model = nn.Sequential(nn.LSTM(20, 30).requires_grad_(False), nn.Linear(30, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated.RSKFAC(model)
        stated.RSKFAC(mlp())


def test_oversampling_zero_with_a_warm_start_trains_200_steps() -> None:
    model = mlp(dtype=torch.float32)
    optimizer = stated.RSKFAC(model, lr=0.01, rank=3, oversampling=0, warm_start=True, factor_every=2, inverse_every=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [rows(dtype=torch.float32) for _ in range(200)])
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(record.rank_output == 3 for record in optimizer.report())

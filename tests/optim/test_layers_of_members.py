"""Attention, tied tables, transposed Linear layers and norms of one's own, under the members that are not K-FAC itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from layers.lookalikes import OwnRMSNorm, Transposed
from optim import stated
from optim.problems import (
    Batch,
    assert_moved,
    assert_same_parameters,
    parameters,
    sentences,
    speaker,
    step,
    train,
    twin,
)
from optim.test_attention import HEADS, WIDTH, batches, go, pair, renamed

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2, "factor_decay": 0.8}
OF_SAMPLES: dict[str, Any] = {"inverse_every": 2, "columns": None}  # without what SENG has no factors for
# Few modes and batches of four rows, so that factors of 8 and 9 are online and cut off. What is dense is not sketched: draws
# go by the names of layers, which differ between models that are the same.
MEMBERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "EKFAC": (stated.EKFAC, EVERY),
    "BKFAC": (stated.BKFAC, {**EVERY, "rank": 3, "decomposition": rkfac.Exact()}),
    "SKFAC": (stated.SKFAC, EVERY),
    "KLDWRM": (stated.KLDWRM, {**EVERY, "variant": "so"}),
    "SENG": (stated.SENG, OF_SAMPLES),
}
each_member = pytest.mark.parametrize("name", MEMBERS)


def member(name: str, model: nn.Module, **keywords: Any) -> Any:
    make, own = MEMBERS[name]
    return make(model, **{"lr": 0.05, "momentum": 0.0, **own, **keywords})


def assert_covered(name: str, optimizer: Any) -> None:
    """Every layer, and by what the member is about."""
    report = optimizer.report()
    assert all(record.covered and not record.reason for record in report)
    kept = {"BKFAC": "online", "SKFAC": "columns"}
    if name in kept:
        assert kept[name] in {record.kept_input for record in report}
        assert kept[name] in {record.kept_output for record in report}


def assert_same_steps(
    name: str, mine: nn.Module, theirs: nn.Module, renames: dict[str, str], batch: Callable[[], Batch]
) -> None:
    """Six steps of two models that are the same function; `renames`: parameters of mine whose names differ in theirs.

    A weight that lies the other way round in one of them is turned.
    """
    optimizers = [(model, member(name, model)) for model in (mine, theirs)]
    start = parameters(mine)
    for _ in range(6):
        x, y = batch()
        for model, optimizer in optimizers:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    expected = parameters(theirs)
    for key, value in parameters(mine).items():
        other = expected[renames.get(key, key)]
        torch.testing.assert_close(value, other if other.shape == value.shape else other.mT, rtol=1e-8, atol=1e-10)
    assert_moved(mine, start)
    for _, optimizer in optimizers:
        assert_covered(name, optimizer)


# --- all of them in one model

LAYERS = {
    *("encoder.self_attn", "encoder.self_attn.out_proj", "encoder.linear1", "encoder.linear2", "encoder.norm1"),
    *("encoder.norm2", "memory", "memory.out_proj", "mix", "norm"),
}


@each_member
def test_the_report_covers_them_and_a_step_moves_everything(name: str) -> None:
    model = speaker()
    optimizer = member(name, model, momentum=0.9)
    start = parameters(model)
    train(model, optimizer, [sentences() for _ in range(3)])
    assert_moved(model, start)
    assert all(p.isfinite().all() for p in model.parameters())
    report = {record.name: record for record in optimizer.report()}
    covered = {key for key, record in report.items() if record.covered}
    assert all(not report[key].reason for key in covered)
    if name == "SENG":
        assert covered == LAYERS
        assert report.keys() - covered == {"table", "head"}
    else:
        assert covered == LAYERS | {"table"}
        assert report["table"].shared_with == ("head",)


def test_seng_says_why_tables_are_left_out_and_gives_them_the_fallback() -> None:
    model = speaker()
    optimizer = member("SENG", model)
    start = model.table.weight.detach().clone()
    step(model, optimizer, sentences())
    reasons = {record.name: record.reason for record in optimizer.report() if not record.covered}
    assert reasons.keys() == {"table", "head"}
    assert set(reasons.values()) == {"SENG has no curvature for a weight that Embedding and Linear share"}
    torch.testing.assert_close(
        model.table.weight.detach(), start - 0.05 * model.table.weight.grad, rtol=1e-12, atol=1e-14
    )
    # One that is tied to nothing has a reason of its own.
    alone = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(30, 4)).double()
    optimizer, start = member("SENG", alone), alone[0].weight.detach().clone()
    step(alone, optimizer, sentences())
    (left,) = (record for record in optimizer.report() if not record.covered)
    assert left.name == "0"
    assert "a sample's gradient would be as large as the table" in left.reason
    torch.testing.assert_close(alone[0].weight.detach(), start - 0.05 * alone[0].weight.grad, rtol=1e-12, atol=1e-14)


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Moments that are never measured, for every statistic comes with a new basis, are the products of eigenvalues.
    "EKFAC": ({"carry": False, "inverse_every": 1}, {"damping_rule": "product", "inverse_every": 1}),
    # So many modes that no factor is wide enough to be kept online.
    "BKFAC": ({"rank": 220}, {}),
    # Of the last batch alone.
    "SKFAC": ({"factor_decay": 0.0}, {"factor_decay": 0.0}),
    "KLDWRM": ({"factor_decay": 0.0}, {"factor_decay": 0.0, "graft": None}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_in_its_limit_a_member_takes_the_steps_of_kfac(name: str) -> None:
    """On every kind of layer at once, the tied table among them."""
    model = speaker()
    other, start = twin(model), parameters(model)
    own, of_kfac = LIMITS[name]
    optimizer = member(name, model, **own)
    plain = stated.KFAC(other, lr=0.05, momentum=0.0, **{**EVERY, **of_kfac})
    for batch in [sentences() for _ in range(5)]:
        step(model, optimizer, batch)
        step(other, plain, batch)
    assert_same_parameters(model, other, rtol=1e-8, atol=1e-10)
    assert_moved(model, start)


# --- attention


@each_member
def test_torchs_encoder_layer_steps_as_the_one_made_by_hand(name: str) -> None:
    """Its packed in-projection is one Linear layer of three times the width."""
    model, hand = pair()
    mine, theirs = member(name, model, momentum=0.9), member(name, hand, momentum=0.9)
    start = renamed(model)
    for x, y in batches(8):
        batch = x[:2, :2], y[:2, :2]
        go(model, mine, batch)
        go(hand, theirs, batch)
    expected = parameters(hand)
    for key, value in renamed(model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-10)
        assert (value - start[key]).abs().max() > 1e-4
    for optimizer in (mine, theirs):
        assert_covered(name, optimizer)


class Read(nn.Module):
    """Attention of a sequence to another one that is made of it, whose width is its own."""

    OTHER = 5

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(x[..., : self.OTHER])
        return self.head(self.attention(x, seen, seen)[0].mean(1))


class HandAttention(nn.Module):
    """nn.MultiheadAttention with separate projections and no bias, in three nn.Linear layers and one more."""

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, WIDTH, bias=False) for width in (WIDTH, Read.OTHER, Read.OTHER, WIDTH)
        )
        weights = {"q.weight": like.q_proj_weight, "k.weight": like.k_proj_weight, "v.weight": like.v_proj_weight}
        self.load_state_dict({**weights, "out.weight": like.out_proj.weight})

    def forward(self, *inputs: Tensor) -> tuple[Tensor, None]:
        projected = zip((self.q, self.k, self.v), inputs, strict=True)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer, x in projected)
        mixed = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)), None


@each_member
def test_separate_projections_step_as_three_linear_layers(name: str) -> None:
    made = nn.MultiheadAttention(WIDTH, HEADS, bias=False, kdim=Read.OTHER, vdim=Read.OTHER, batch_first=True)
    hand = HandAttention(made)
    mine = Read(made).double()
    theirs = Read(hand).double()
    theirs.head.load_state_dict(mine.head.state_dict())
    renames = {f"attention.{part}_proj_weight": f"attention.{part}.weight" for part in "qkv"}
    renames["attention.out_proj.weight"] = "attention.out.weight"
    assert_same_steps(name, mine, theirs, renames, lambda: (torch.randn(2, 2, WIDTH).double(), torch.randint(4, (2,))))


# --- layers of other libraries


class Mean(nn.Module):
    """Of a model's logits over positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean(1)


def sequences() -> Batch:
    return torch.randn(2, 2, 6).double(), torch.randint(4, (2,))


@each_member
def test_a_transposed_linear_layer_steps_as_a_linear_layer_does(name: str) -> None:
    mine = nn.Sequential(Transposed(8, 6), nn.Tanh(), Transposed(4, 8)).double()
    theirs = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    theirs.load_state_dict({key: value.mT if value.ndim > 1 else value for key, value in mine.state_dict().items()})
    # On sequences, whose positions the layers share.
    assert_same_steps(name, Mean(mine), Mean(theirs), {}, sequences)


@each_member
def test_a_norm_of_ones_own_steps_as_torchs_does(name: str) -> None:
    first, last = nn.Linear(6, 8), nn.Linear(8, 4)
    mine = nn.Sequential(first, OwnRMSNorm(8, eps=1e-5), nn.Tanh(), last).double()
    theirs = nn.Sequential(twin(first), nn.RMSNorm(8, eps=1e-5), nn.Tanh(), twin(last)).double()
    assert_same_steps(name, Mean(mine), Mean(theirs), {}, sequences)

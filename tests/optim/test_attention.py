"""torch's own transformer layers train step by step as the same layers made of nn.Linear do."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rkfac
from optim import stated
from optim.problems import (
    assert_same_averages,
    assert_same_parameters,
    parameters,
    sentences,
    speaker,
    step,
    train,
    twin,
    updates,
)

Batch = tuple[Tensor, Tensor]
WIDTH, HEADS, WIDE = 8, 2, 12


class HandEncoder(nn.Module):
    """nn.TransformerEncoderLayer, norm last, with its own weights in nn.Linear layers."""

    def __init__(self, like: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.load_state_dict({NAMES.get(name, name): value for name, value in like.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = ((q @ k.mT / math.sqrt(WIDTH // HEADS)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.linear2(torch.relu(self.linear1(x))))


NAMES = {
    "self_attn.in_proj_weight": "qkv.weight",
    "self_attn.in_proj_bias": "qkv.bias",
    "self_attn.out_proj.weight": "out.weight",
    "self_attn.out_proj.bias": "out.bias",
}


def pair() -> tuple[nn.Module, nn.Module]:
    """torch's own and the same by hand, with a head."""
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDE, dropout=0.0, batch_first=True).double()
    head = nn.Linear(WIDTH, 4).double()
    hand = HandEncoder(encoder).double()
    return nn.Sequential(encoder, head), nn.Sequential(hand, twin(head))


def batches(count: int) -> list[Batch]:
    return [(torch.randn(6, 5, WIDTH).double(), torch.randint(4, (6, 5))) for _ in range(count)]


def go(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()).backward()
    optimizer.step()


def renamed(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"0.{NAMES.get(name[2:], name[2:])}" if name[0] == "0" else name: p for name, p in parameters(model).items()
    }


TRAJECTORIES: dict[str, dict[str, Any]] = {
    "exact": {},
    "truncated": {"rank": 3, "decomposition": rkfac.Exact()},
    "own length": {"graft": None, "kl_clip": 1e-3},
    "mc": {"fisher": "mc", "likelihood": rkfac.Categorical(class_dim=-1)},
    "reduce": {"weight_sharing": "reduce"},
    "adamw": {"graft": "adamw", "lr": 1e-3, "momentum": None},
    "product": {"damping_rule": "product"},
}


@pytest.mark.parametrize("settings", TRAJECTORIES)
def test_thirty_steps_are_those_of_the_layer_made_by_hand(settings: str) -> None:
    model, hand = pair()
    keywords = {"lr": 0.05, "momentum": 0.9, "factor_every": 2, "inverse_every": 5, **TRAJECTORIES[settings]}
    mine, theirs = stated.KFAC(model, **keywords), stated.KFAC(hand, **keywords)
    start = renamed(model)
    for batch in batches(30):
        go(model, mine, batch)
        go(hand, theirs, batch)
    expected = parameters(hand)
    for name, value in renamed(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-8)
        assert (value - start[name]).abs().max() > 1e-3
    assert updates(mine) == updates(theirs) == {15}


class Recomputed(nn.Module):
    """Its encoder is run again in the backward pass."""

    def __init__(self, inner: nn.Sequential, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(WIDTH, WIDTH).double(), inner, reentrant
        nn.init.eye_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.inner(x)
        return self.inner[1](checkpoint(self.inner[0], x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant, fisher", [(True, "empirical"), (False, "empirical"), (False, "mc")])
@pytest.mark.parametrize("alone", [False, True], ids=["layer", "attention alone"])
def test_checkpoints_count_attention_once(reentrant: bool, fisher: str, alone: bool) -> None:
    class Alone(nn.Module):
        """The last thing that is recomputed is inside the attention, where recomputation stops early."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model = nn.Sequential(Alone().double(), nn.Linear(WIDTH, 4).double()) if alone else pair()[0]
    models = [Recomputed(twin(model), kind) for kind in (None, reentrant)]
    models[1].load_state_dict(models[0].state_dict())
    keywords: dict[str, Any] = {"factor_every": 1, "inverse_every": 2, "fisher": fisher}
    keywords |= {"likelihood": rkfac.Categorical(class_dim=-1)} if fisher == "mc" else {}
    optimizers = [stated.KFAC(m, **keywords) for m in models]
    for batch in batches(3):
        for m, o in zip(models, optimizers, strict=True):
            go(m, o, batch)
    assert_same_averages(optimizers[1], optimizers[0])
    assert_same_parameters(models[1], models[0])
    assert updates(optimizers[1]) == {3}


def test_offloaded_activations_are_left_where_they_are() -> None:
    model, _ = pair()
    other = twin(model)
    mine, theirs = (
        stated.KFAC(model, factor_every=1, inverse_every=1),
        stated.KFAC(other, factor_every=1, inverse_every=1),
    )
    for x, y in batches(2):
        mine.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        mine.step()
        go(other, theirs, (x, y))
    assert_same_parameters(model, other)


@pytest.mark.parametrize("part", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_a_frozen_part_of_attention_stays_and_the_rest_goes_on(part: str) -> None:
    model = speaker()
    optimizer = stated.KFAC(model, factor_every=1, inverse_every=1)
    train(model, optimizer, [sentences() for _ in range(2)])
    frozen = model.encoder.self_attn.get_parameter(part).requires_grad_(False)
    start = parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [sentences() for _ in range(2)])
    stayed = {name for name, value in parameters(model).items() if torch.equal(value, start[name])}
    assert stayed == {f"encoder.self_attn.{part}"}
    assert frozen.grad is None
    # Thawed, it is trained again.
    frozen.requires_grad_(True)
    train(model, optimizer, [sentences() for _ in range(2)])
    assert not torch.equal(frozen, start[f"encoder.self_attn.{part}"])


def test_two_optimizers_look_into_one_attention_layer() -> None:
    model, _ = pair()
    other = twin(model)
    attention = [p for n, p in model.named_parameters() if "self_attn" in n]
    rest = [p for n, p in model.named_parameters() if "self_attn" not in n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keywords: dict[str, Any] = {"factor_every": 1, "inverse_every": 1, "momentum": 0.0}
        pieces = [stated.KFAC(model, params=params, **keywords) for params in (attention, rest, attention[:1])]
        whole = stated.KFAC(other, **keywords)
    pieces[2].param_groups[0]["lr"] = 0.0
    for batch in batches(3):
        for optimizer in pieces:
            optimizer.zero_grad()
        F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()).backward()
        for optimizer in pieces:
            optimizer.step()
        go(other, whole, batch)
    assert_same_parameters(model, other)
    assert updates(pieces[2]) == {3}


def test_rows_drawn_at_random_train_attention_and_tied_weights() -> None:
    model = speaker()
    optimizer = stated.RSKFAC(model, rank=3, rows=4, factor_every=1, inverse_every=2)
    losses = [step(model, optimizer, batch) for batch in [sentences()] * 30]
    assert losses[-1] < losses[0]
    assert updates(optimizer) == {30}


def test_apply_backward_leaves_attention_and_tied_weights_to_the_step() -> None:
    model = speaker()
    other = twin(model)
    keywords: dict[str, Any] = {"factor_every": 2, "inverse_every": 3, "momentum": 0.9}
    mine, theirs = stated.KFAC(model, apply="backward", **keywords), stated.KFAC(other, **keywords)
    for batch in [sentences() for _ in range(8)]:
        step(model, mine, batch)
        step(other, theirs, batch)
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


def test_a_whole_transformer_is_covered_and_learns() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, WIDE, dropout=0.1, batch_first=True)
    optimizer = stated.RSKFAC(model, lr=0.02, factor_every=1, inverse_every=2)
    source, target = torch.randn(6, 5, WIDTH), torch.randn(6, 4, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.mse_loss(model(source, target, tgt_mask=mask), target.roll(-1, 1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert all(r.covered and not r.reason for r in optimizer.report())
    assert sum(r.parameters for r in optimizer.report()) == sum(p.numel() for p in model.parameters())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("need_weights", [False, True])
def test_looking_into_a_forward_changes_no_bit_of_it(need_weights: bool) -> None:
    """Nor of its dropout, nor of its gradients."""
    found = []
    for watched in (False, True):
        torch.manual_seed(5)
        model, x = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5), torch.randn(5, 3, WIDTH)
        optimizer = stated.KFAC(model, factor_every=1) if watched else None
        torch.manual_seed(6)
        y, weights = model(x, x, x, need_weights=need_weights)
        y.square().sum().backward()
        found.append([y, torch.rand(3), *(p.grad for p in model.parameters())] + ([weights] if need_weights else []))
        assert optimizer is None or optimizer._capture.active
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)

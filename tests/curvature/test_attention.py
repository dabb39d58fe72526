"""nn.MultiheadAttention against autograd, and against attention made of nn.Linear layers that are called."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from curvature.brute import block_of, factors, held, kfac, losses
from rkfac.curvature import inside
from rkfac.curvature.block import Block

WIDTH, HEADS, SAMPLES, LONG, SHORT = 6, 2, 4, 5, 3


class Attends(nn.Module):
    """An attention layer whose query, key and value are the same tensor, or come from two, or are three."""

    def __init__(self, inputs: str, call: dict[str, Any], unbatched: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.inputs, self.call, self.unbatched = inputs, call, unbatched

    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(2)
        make = self._one
        q = make(LONG, WIDTH)
        if self.inputs == "self":
            return q, q, q
        k = make(SHORT, self.attention.kdim)
        return q, k, k if self.inputs == "memory" else make(SHORT, self.attention.vdim)

    def _one(self, length: int, width: int) -> Tensor:
        samples = () if self.unbatched else (SAMPLES,)
        leading = (*samples, length) if self.attention.batch_first else (length, *samples)
        return torch.randn(*leading, width, dtype=torch.float64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, **self.call)[0]


def causal(heads: bool = False) -> Tensor:
    mask = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
    return mask.expand(SAMPLES * HEADS, LONG, LONG) if heads else mask


PADDING = torch.tensor([[False, False, True]] * SAMPLES)
CASES: dict[str, Callable[[], Attends]] = {
    "self": lambda: Attends("self", {}),
    "self, batch first": lambda: Attends("self", {}, batch_first=True),
    "self, no weights": lambda: Attends("self", {"need_weights": False}, batch_first=True),
    "self, no bias": lambda: Attends("self", {}, bias=False),
    "self, no bias, batch first": lambda: Attends("self", {}, bias=False, batch_first=True),
    "self, causal": lambda: Attends("self", {"attn_mask": causal()}),
    "self, causal, no weights": lambda: Attends(
        "self", {"attn_mask": causal(), "is_causal": True, "need_weights": False}
    ),
    "self, a mask a head": lambda: Attends("self", {"attn_mask": causal(True)}),
    "self, dropout": lambda: Attends("self", {}, dropout=0.5),
    "self, dropout, no weights": lambda: Attends("self", {"need_weights": False}, dropout=0.5),
    "self, key and value biases": lambda: Attends("self", {}, add_bias_kv=True),
    "self, zero attention": lambda: Attends("self", {}, add_zero_attn=True),
    "self, unbatched": lambda: Attends("self", {}, unbatched=True),
    "memory": lambda: Attends("memory", {}),
    "memory, batch first": lambda: Attends("memory", {"need_weights": False}, batch_first=True),
    "memory, no bias": lambda: Attends("memory", {}, bias=False),
    "memory, padding": lambda: Attends("memory", {"key_padding_mask": PADDING}),
    "three": lambda: Attends("three", {}),
    "three, no bias, batch first": lambda: Attends("three", {}, bias=False, batch_first=True),
    "separate": lambda: Attends("three", {}, kdim=4, vdim=5),
    "separate, batch first": lambda: Attends("three", {}, kdim=4, vdim=5, batch_first=True),
    "separate, no bias": lambda: Attends("three", {}, kdim=4, vdim=5, bias=False),
    "separate, key and value biases": lambda: Attends(
        "three", {"need_weights": False}, kdim=4, vdim=5, add_bias_kv=True
    ),
}
each_case = pytest.mark.parametrize("case", CASES)


def made(case: str) -> Attends:
    torch.manual_seed(1)
    model = CASES[case]().double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)  # biases too
    return model


def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor, Tensor]]:
    """What reaches the blocks from now on: (name, input, output gradient)."""
    found: list[tuple[str, Tensor, Tensor]] = []
    true = Block.observe

    def observe(self: Block, use: Any, x: Tensor, g: Tensor, *rest: Any) -> None:
        found.append((self.name, x, g))
        true(self, use, x, g, *rest)

    monkeypatch.setattr(Block, "observe", observe)
    return found


@each_case
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_rows_sum_up_to_autograds_gradients(case: str, sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(case)
    optimizer = kfac(model, weight_sharing=sharing)
    found = observed(monkeypatch)
    losses(model(*model.given())).mean().backward()
    for block in optimizer._blocks.values():
        calls = [(x, g) for name, x, g in found if name == block.name]
        assert calls, block.name
        samples = 1 if model.unbatched else SAMPLES
        assert all(x.ndim == g.ndim == 3 and len(x) == len(g) == samples for x, g in calls)
        weight = sum(torch.einsum("nsi,nsj->ij", g, x) for x, g in calls)
        torch.testing.assert_close(weight, block.parameters[0].grad)
        if block.bias:
            torch.testing.assert_close(sum(g.sum((0, 1)) for _, g in calls), block.parameters[1].grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert all(block.ready for block in optimizer._blocks.values())


@each_case
def test_every_parameter_has_a_block_or_a_reason(case: str) -> None:
    model = made(case)
    optimizer = kfac(model)
    reports = optimizer.report()
    assert sum(r.parameters for r in reports) == sum(p.numel() for p in model.parameters())
    left = {r.name for r in reports if not r.covered}
    expected = {f"attention.{name}" for name in ("bias_k", "bias_v") if "value biases" in case}
    if case.startswith("separate") and "no bias" not in case:
        expected.add("attention.in_proj_bias")
    assert left == expected
    assert all("is not a part of one projection" in r.reason for r in reports if not r.covered)


# --- the same attention from Linear layers that are called


class ByHand(nn.Module):
    """Batch first, without masks; the packed projection is called on each input and cut."""

    def __init__(self, like: Attends) -> None:
        super().__init__()
        theirs = like.attention
        self.batch_first, bias = theirs.batch_first, theirs.in_proj_bias is not None
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.project.weight, self.out.weight = (
            nn.Parameter(w.detach().clone()) for w in (theirs.in_proj_weight, theirs.out_proj.weight)
        )
        if bias:
            self.project.bias, self.out.bias = (
                nn.Parameter(b.detach().clone()) for b in (theirs.in_proj_bias, theirs.out_proj.bias)
            )

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        q, k, v = (t if t is None or self.batch_first else t.transpose(0, 1) for t in (q, k, v))
        parts = self.project(q).chunk(3, -1)
        if k is not None:
            parts = (parts[0], *self.project(k).chunk(3, -1)[1:])
        if v is not None:
            parts = (*parts[:2], self.project(v).chunk(3, -1)[2])
        one, two, three = (p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts)
        scores = (one @ two.mT / math.sqrt(WIDTH // HEADS)).softmax(-1)
        mixed = self.out((scores @ three).transpose(1, 2).flatten(2))
        return mixed if self.batch_first else mixed.transpose(0, 1)


def distinct(model: Attends) -> tuple[Tensor, ...]:
    q, k, v = model.given()
    return (q,) if q is k else (q, k) if k is v else (q, k, v)


PACKED = [
    c for c in CASES if c in ("self", "memory", "three") or c.endswith(("no bias, batch first", "memory, no bias"))
]


@pytest.mark.parametrize("case", [*PACKED, "self, batch first", "memory, batch first", "self, no weights"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_factors_are_those_of_linear_layers_that_are_called(case: str, sharing: str, fisher: str) -> None:
    model = made(case)
    other = ByHand(model)
    if fisher == "mc":
        options: dict[str, Any] = {"fisher": "mc", "likelihood": "gaussian"}
    else:
        options = {}
    mine, theirs = (kfac(m, weight_sharing=sharing, **options) for m in (model, other))
    for m, optimizer, given in ((model, mine, model.given()), (other, theirs, distinct(model))):
        y = m(*given)
        y = y if model.attention.batch_first else y.transpose(0, 1)
        losses(y).mean().backward()
        optimizer.step()
    for name, hand in (("attention", "project"), ("attention.out_proj", "out")):
        for got, expected in zip(held(mine, name), held(theirs, hand), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("case", ["self, batch first", "self, no weights"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_one_sample_at_a_time(case: str, sharing: str) -> None:
    model = made(case)
    other, (q, *_) = ByHand(model), model.given()
    optimizer = kfac(model, weight_sharing=sharing)
    losses(model(q, q, q)).mean().backward()
    optimizer.step()
    for name, module in (("attention", other.project), ("attention.out_proj", other.out)):
        A, G = factors(other, module, q, sharing)
        terms = 1 if sharing == "reduce" else LONG  # what the last layer has of a sample
        assert terms == block_of(optimizer, name).rows // SAMPLES or sharing == "reduce"
        torch.testing.assert_close(held(optimizer, name), (A, G))


# --- what may happen to it


@pytest.mark.parametrize("inputs", ["self", "memory", "three"])
def test_autocast_sees_the_products_too(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(inputs).float()
    optimizer = kfac(model)
    found = observed(monkeypatch)
    given = [t.float() for t in model.given()]
    given = [given[0]] * 3 if inputs == "self" else [given[0], given[1], given[1]] if inputs == "memory" else given
    with torch.autocast("cpu", torch.bfloat16):
        y = model(*given) + model(2 * given[0], *given[1:])
    losses(y.float()).mean().backward()
    for name, weight in (
        ("attention", model.attention.in_proj_weight),
        ("attention.out_proj", model.attention.out_proj.weight),
    ):
        calls = [(x.float(), g.float()) for which, x, g in found if which == name]
        together = sum(torch.einsum("nsi,nsj->ij", g, x) for x, g in calls)
        assert torch.linalg.vector_norm(together - weight.grad) < 2e-2 * torch.linalg.vector_norm(weight.grad)
    optimizer.step()
    assert all(torch.isfinite(t).all() for name in ("attention", "attention.out_proj") for t in held(optimizer, name))


def raising(error: type[BaseException]) -> Callable[..., Tensor]:
    def softmax(*_: Any, **__: Any) -> Tensor:
        raise error("in the middle")

    return softmax


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_nothing_behind(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = made("self"), made("self")
    optimizer, other = kfac(model), kfac(twin)
    with monkeypatch.context() as patch:
        patch.setattr(F, "softmax", raising(error))
        with pytest.raises(error, match="in the middle"):
            model(*model.given())
    if error is RuntimeError:  # an interrupt is cleared away by the next forward
        assert _get_current_dispatch_mode() is None
    for m, o in ((model, optimizer), (twin, other)):
        losses(m(*m.given())).mean().backward()
        assert _get_current_dispatch_mode() is None
        o.step()
    for name in ("attention", "attention.out_proj"):
        torch.testing.assert_close(held(optimizer, name), held(other, name), rtol=0, atol=0)


def test_closing_clears_away_an_interrupted_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("self")
    optimizer = kfac(model)
    monkeypatch.setattr(F, "softmax", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(*model.given())
    optimizer.close()
    assert _get_current_dispatch_mode() is None


def test_the_graph_is_let_go_with_its_loss() -> None:
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.held = marker
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    class Marker:
        pass

    model = made("self")
    optimizer = kfac(model)
    for backward in (False, True):
        marker = Marker()
        gone = weakref.ref(marker)
        x = Passing.apply(model.given()[0].requires_grad_())
        loss = losses(model(x, x, x)).mean()
        if backward:
            loss.backward()
            optimizer.step()
        del x, loss, marker
        gc.collect()
        assert gone() is None


def test_products_of_an_unknown_kind_are_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "PRODUCTS", {})
    model = made("self")
    optimizer = kfac(model, lr=0.1)
    start = model.attention.in_proj_weight.detach().clone()
    losses(model(*model.given())).mean().backward()
    with pytest.warns(
        UserWarning, match="'attention', 'attention.out_proj' got gradients, but no call of theirs was seen"
    ):
        optimizer.step()
    assert all("no call of it was seen" in r.reason for r in optimizer.report())
    torch.testing.assert_close(
        model.attention.in_proj_weight.detach(), start - 0.1 * model.attention.in_proj_weight.grad
    )


def test_a_projection_that_is_used_by_hand_too_is_retired() -> None:
    class Reused(Attends):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().forward(q, k, v) + 3 * F.linear(q, self.attention.in_proj_weight[:WIDTH])

    model = Reused("memory", {}).double()
    optimizer = kfac(model)
    with pytest.warns(UserWarning, match="'attention' trains by the fallback rule"):
        losses(model(*model.given())).mean().backward()
    optimizer.step()
    found = {r.name: r.covered for r in optimizer.report()}
    assert found == {"attention": False, "attention.out_proj": True}


def test_an_evaluation_without_gradients_takes_torchs_own_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("self, batch first").eval()
    kfac(model)
    ran = []
    native = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: ran.append(1) or native(*args))
    with torch.no_grad():
        model(*model.given())
    assert ran


@pytest.mark.parametrize(
    "choice, left",
    [
        ({"exclude": "MultiheadAttention"}, {"attention", "attention.out_proj"}),
        ({"exclude": "*.out_proj"}, {"attention.out_proj"}),
        ({"include": "attention"}, {"attention.out_proj"}),
        ({"include": "MultiheadAttention"}, set()),
        ({"max_factor_dim": 17}, {"attention"}),
    ],
)
def test_projections_are_chosen_by_name_or_by_the_class_of_the_attention(
    choice: dict[str, Any], left: set[str]
) -> None:
    model = made("self")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kfac(model, **choice)
    assert {r.name for r in optimizer.report() if not r.covered} == left

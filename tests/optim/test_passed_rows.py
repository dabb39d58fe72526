"""Natural gradients of a step that comes to another preconditioner, made anew from their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from rkfac.curvature.passed import Passed
from rkfac.linalg import LowRank, Rowwise
from rkfac.linalg.multipliers import factored

Change = Callable[[nn.Module], None]


def rowwise(seed: int, d_G: int, d_A: int, rank: int, dtype: torch.dtype) -> Rowwise:
    generator = torch.Generator().manual_seed(seed)

    def low(d: int) -> LowRank:
        U = torch.linalg.qr(torch.randn(d, rank, generator=generator, dtype=torch.float64))[0]
        s = torch.rand(rank, generator=generator, dtype=torch.float64).sort(descending=True).values + 0.1
        return LowRank(U.to(dtype), s.to(dtype), torch.tensor(0.05, dtype=torch.float64))

    G, A = low(d_G), low(d_A)
    return Rowwise(G, A, factored(G, A, torch.tensor(0.3), torch.tensor(0.2)))


def summed(way: Rowwise, g: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    rows, inputs, ones = way.of(g, x, bias)
    return rows.mT @ inputs, None if ones is None else rows.mT @ ones


def drawn(bias: bool, dtype: torch.dtype, passes: int = 1) -> tuple[Passed, Rowwise, Rowwise, Any, Any]:
    generator = torch.Generator().manual_seed(9)
    passed, before, after = Passed(), rowwise(1, 40, 50, 12, dtype), rowwise(2, 40, 50, 9, dtype)
    was, will = [], []
    for _ in range(passes):
        g, x = (torch.randn(6, d, generator=generator, dtype=torch.float64).to(dtype) for d in (40, 50 - bias))
        passed.add(g, x)
        was.append(summed(before, g, x, bias))
        will.append(summed(after, g, x, bias))

    def total(many: list[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        return [None if part[0] is None else torch.stack(part).sum(0) for part in zip(*many, strict=True)]  # type: ignore[arg-type]

    return passed, before, after, total(was), total(will)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-15, 1e12])
def test_a_sum_of_rows_is_made_anew_at_the_size_it_was_given(dtype: torch.dtype, bias: bool, scale: float) -> None:
    passed, before, after, (W, b), (W2, b2) = drawn(bias, dtype, passes=2)
    W, b = W * scale, None if b is None else b * scale
    assert passed.remade(W, b, before, after)
    close = {"rtol": 1e-4, "atol": 0} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 0}
    assert float((W - scale * W2).norm() / (scale * W2.norm())) < close["rtol"]
    if b is not None:
        assert float((b - scale * b2).norm() / (scale * b2.norm())) < close["rtol"]


@pytest.mark.parametrize("what", ["weight", "one entry", "bias", "nan"])
def test_what_is_not_the_rows_sum_is_left_alone(what: str) -> None:
    passed, before, after, (W, b), _ = drawn(True, torch.float32)
    if what == "weight":
        W += 1e-3 * torch.randn(W.shape, generator=torch.Generator().manual_seed(3))
    elif what == "one entry":
        W[3, 4] += 0.01 * W.norm()
    elif what == "bias":
        b[2] += 0.01 * W.norm()
    else:
        W[0, 0] = float("nan")
    kept = W.clone(), b.clone()
    assert not passed.remade(W, b, before, after)
    for now, then in zip((W, b), kept, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_rows_are_used_where_they_are_few() -> None:
    passed, before, after, _, _ = drawn(False, torch.float32)
    assert passed.cheaper(before, after)
    for _ in range(7):
        passed.add(torch.randn(6, 40), torch.randn(6, 50))
    assert not passed.cheaper(before, after)  # 48 rows, 2 (12 + 9) modes
    passed.drop()
    assert not passed.cheaper(before, after)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 36, bias=False), nn.Tanh(), nn.Linear(36, 30)
    ).double()


SETTINGS: dict[str, Any] = {"lr": 0.05, "rank": 12, "factor_every": 1, "inverse_every": 2, "eager_start": False}


def run(
    optimizer: rkfac.KFAC, model: nn.Module, change: Change = lambda model: None, drops: bool = True
) -> list[Tensor]:
    seen = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        if drops:
            optimizer.zero_grad()
        x = torch.randn(10, 48, generator=generator, dtype=torch.float64)
        y = torch.randint(30, (10,), generator=generator)
        for half in (slice(0, 5), slice(5, 10)):
            (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
        change(model)
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return seen


def clip(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.25)


class Counted:
    """How often gradients were made anew, and how often that was refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers: list[bool] = []
        inner = Passed.remade

        def remade(*arguments: Any) -> bool:
            self.answers.append(inner(*arguments))
            return self.answers[-1]

        patch.setattr(Passed, "remade", remade)


@pytest.mark.parametrize("member", [rkfac.RSKFAC, rkfac.BKFAC])
@pytest.mark.parametrize("graft", [None, "sgd"])
@pytest.mark.parametrize("change", [lambda model: None, clip], ids=["as they came", "scaled"])
def test_steps_are_those_of_plain_gradients(
    member: type[rkfac.KFAC], graft: Any, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, seen = Counted(monkeypatch), []
    for apply in ("step", "backward"):
        model = network()
        optimizer = member(model, apply=apply, graft=graft, **SETTINGS)  # type: ignore[call-arg]
        seen.append(run(optimizer, model, change))
    assert len(counted.answers) == 3 * 3  # three layers, refreshes at steps 2, 4, 6; the first has plain gradients
    assert all(counted.answers)
    for plain, natural in zip(*seen, strict=True):
        assert float((plain - natural).norm()) <= 1e-10 * float(plain.norm())


def test_gradients_that_were_not_dropped_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, seen = Counted(monkeypatch), []
    for apply in ("step", "backward"):
        model = network()
        seen.append(run(rkfac.RSKFAC(model, apply=apply, graft=None, **SETTINGS), model, drops=False))  # type: ignore[arg-type]
    assert counted.answers
    assert not any(counted.answers)
    for plain, natural in zip(*seen, strict=True):
        assert float((plain - natural).norm()) <= 1e-10 * float(plain.norm())


def test_no_rows_are_kept_beyond_the_step() -> None:
    model = network()
    optimizer = rkfac.RSKFAC(model, apply="backward", **SETTINGS)
    run(optimizer, model)
    assert all(not block.passed._passes for block in optimizer._blocks.values())
    model(torch.randn(4, 48, dtype=torch.float64)).sum().backward()
    assert any(block.passed._passes for block in optimizer._blocks.values())
    optimizer.zero_grad()
    assert all(not block.passed._passes for block in optimizer._blocks.values())

"""Gradients and activations of any size move the weights as float64 says they should."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import mlp

SCALES = (1e-18, 1e-9, 1e12)
SMALL: dict[str, Any] = {"rank": 3, "oversampling": 2, "power_iterations": 2}
SKETCHED: dict[str, Callable[..., rkfac.KFAC]] = {
    "KFAC": stated.KFAC,
    "RSKFAC": partial(stated.RSKFAC, **SMALL),
    "SREKFAC": partial(stated.SREKFAC, **SMALL),
    "Nystrom": partial(stated.KFAC, decomposition=rkfac.Nystrom(), **SMALL),
}
# A buffer holds the update itself; weights of 1e18 would round an update of 0.07 away.
EVERY: dict[str, Any] = {"graft": None, "factor_every": 1, "inverse_every": 1, "momentum": 0.5}


@pytest.fixture(autouse=True)
def _one_sketch_for_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian numbers are drawn in float64 and rounded, so that both models see the same test matrix."""
    draw = torch.randn

    def randn(*size: Any, dtype: torch.dtype | None = None, **keywords: Any) -> Tensor:
        return draw(*size, dtype=torch.float64, **keywords).to(dtype or torch.get_default_dtype())

    monkeypatch.setattr(torch, "randn", randn)


def buffers(
    dtype: torch.dtype, build: Callable[..., rkfac.KFAC], steps: int, loss: float, inputs: float, **keywords: Any
) -> list[Tensor]:
    """Momentum buffers after some steps of a model whose loss and inputs are scaled, and its first weight unscaled."""
    torch.manual_seed(1)
    model = mlp(dtype=torch.float32)
    # Beside a bias's column of ones, inputs of 1e-9 are below the rounding of any float32 eigenvector.
    model[0] = nn.Linear(6, 8, bias=False)
    x, y = torch.randn(12, 6) * inputs, torch.randint(4, (12,))
    with torch.no_grad():
        model[0].weight.div_(inputs)
    model, x = model.to(dtype), x.to(dtype)
    optimizer = build(model, **{**EVERY, **keywords})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(steps):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * loss).backward()
            optimizer.step()
    return [optimizer.state[p]["momentum_buffer"].double() for p in model.parameters()]


def assert_as_in_float64(build: Callable[..., rkfac.KFAC], bound: float = 1e-3, **keywords: Any) -> None:
    for steps in (1, 2):
        single = buffers(torch.float32, build, steps, **keywords)
        double = buffers(torch.float64, build, steps, **keywords)
        for index, (mine, theirs) in enumerate(zip(single, double, strict=True)):
            size = torch.linalg.vector_norm(theirs)
            assert size > 0, f"parameter {index} is frozen"
            error = float(torch.linalg.vector_norm(mine - theirs) / size)
            assert error < bound, f"parameter {index} after {steps} steps: {error:.1e}, {keywords}"


@pytest.mark.parametrize("clip", [0.07, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("name", SKETCHED)
def test_the_update_is_that_of_float64_whatever_the_loss_is_multiplied_by(
    name: str, rule: str, clip: float | None
) -> None:
    for scale in SCALES:
        # An unclipped direction grows as 1 / scale; the rate undoes it, so that later steps are ordinary ones too.
        lr = 0.01 * scale if clip is None else 0.1
        assert_as_in_float64(
            SKETCHED[name], loss=scale, inputs=1.0, lr=lr, damping_rule=rule, update_clip=clip, factor_start="unbiased"
        )


@pytest.mark.parametrize("clip", [0.07, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("name", SKETCHED)
def test_the_update_is_that_of_float64_whatever_the_inputs_are_multiplied_by(
    name: str, rule: str, clip: float | None
) -> None:
    for scale in SCALES:
        # One entry of the first layer's direction is as large as 1 / scale; a small rate keeps the others ordinary.
        lr = 0.01 * min(1.0, scale)
        assert_as_in_float64(
            SKETCHED[name], loss=1.0, inputs=scale, lr=lr, damping_rule=rule, update_clip=clip, factor_start="unbiased"
        )


@pytest.mark.parametrize("start", ["identity", "paper"])
@pytest.mark.parametrize("name", SKETCHED)
def test_the_update_is_that_of_float64_beside_an_identity_far_larger_or_smaller(name: str, start: str) -> None:
    for scale in SCALES:
        # The paper's sketch of an identity keeps arbitrary directions: only a full basis can be compared.
        whole = {"rank": 16} if start == "paper" else {}
        assert_as_in_float64(SKETCHED[name], loss=scale, inputs=1.0, lr=0.01, factor_start=start, **whole)


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("name", SKETCHED)
def test_absolute_damping_gives_the_update_of_float64(name: str, rule: str) -> None:
    # A damping that is small beside what it damps asks for more digits than float32 gradients have, so it grows along.
    for scale in SCALES:
        damping = 0.1 * max(1.0, scale) ** 2
        assert_as_in_float64(
            SKETCHED[name],
            loss=scale,
            inputs=1.0,
            lr=0.01,
            damping=damping,
            damping_rule=rule,
            relative_to=None,
            factor_start="unbiased",
        )


@pytest.mark.parametrize("name", ["RSKFAC"])
def test_a_deep_sigmoid_net_trains(name: str) -> None:
    """Its first gradients are 24 layers of sigmoids away from the loss: 1e-20 and less."""
    model = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(16, 16), nn.Sigmoid())))
    x, y = torch.randn(32, 16), torch.rand(32, 16)
    optimizer = SKETCHED[name](
        model,
        lr=0.1,
        graft=None,
        momentum=0.0,
        update_clip=0.07,
        factor_every=1,
        inverse_every=50,
        factor_start="unbiased",
    )
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(50):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if i == 0:
                first = model[0].weight.grad
                assert first is not None
                assert 0 < float(first.abs().max()) < 1e-15
            start = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            moved = [float((p.detach() - s).abs().max()) for p, s in zip(model.parameters(), start, strict=True)]
            assert all(0 < m < 1 for m in moved), f"step {i}: {moved}"
            losses.append(loss.item())
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm])
def test_norm_layers_with_gradients_of_1e_19_move_as_in_float64(norm: type[nn.Module], relative: bool) -> None:
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(2)
        layer = norm(8).to(dtype)
        x, y = torch.randn(16, 8).to(dtype), torch.randn(16, 8).to(dtype)
        optimizer = stated.KFAC(
            layer,
            momentum=0.5,
            factor_every=1,
            inverse_every=1,
            factor_start="unbiased",
            relative_to="largest" if relative else None,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                optimizer.zero_grad()
                (1e-18 * F.mse_loss(layer(x), y)).backward()
                optimizer.step()
        found[dtype] = [optimizer.state[p]["momentum_buffer"].double() for p in layer.parameters()]
    for mine, theirs in zip(found[torch.float32], found[torch.float64], strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("fails", [False, True], ids=["healthy", "first decomposition fails"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
def test_milliseconds_since_1970_beside_ordinary_features_move_no_weight_beyond_the_clip(
    fallback: str, momentum: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(16, 5)
    x[:, 2] = 1.6e12 + 1e9 * torch.rand(16)
    with torch.no_grad():
        model[0].weight[:, 2].mul_(1e-12)  # so that gradients pass the tanh
    y = torch.randint(3, (16,))
    lr, clip = 0.1, 0.07
    optimizer = stated.RSKFAC(
        model, lr=lr, update_clip=clip, momentum=momentum, fallback=fallback, factor_every=1, inverse_every=1
    )
    solvers = {name: getattr(torch.linalg, name) for name in ("svd", "eigh")}

    def broken(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    said = []
    for i in range(8):
        for name, solver in solvers.items():
            monkeypatch.setattr(torch.linalg, name, broken if fails and i < 2 else solver)
        start = [p.detach().double() for p in model.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(w.message) for w in caught]
        # Clipped directions add up in a momentum buffer to at most clip / (1 - momentum).
        largest = lr * clip * sum(momentum**k for k in range(i + 1))
        for layer in (0, 1):
            moved = [(p.detach().double() - s).flatten() for p, s in zip(model.parameters(), start, strict=True)]
            update = torch.cat(moved[2 * layer : 2 * layer + 2])
            rms = float(torch.linalg.vector_norm(update)) / math.sqrt(update.numel())
            assert rms <= largest * (1 + 1e-5), f"layer {layer} moved by {rms} in step {i}, allowed {largest}"
    assert not any("NaN" in text for text in said), said
    assert bool(said) == fails

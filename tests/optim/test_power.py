"""power=: the damped curvature to a power between the gradient (0) and the natural gradient (-1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac

POWERS = [-1.0, -0.75, -0.5, -0.25]
FULL: dict[str, Any] = {"decomposition": rkfac.Exact(), "graft": None, "momentum": 0.0, "rows": None, "lr": 1.0}


def to_power(X: Tensor, damping: float, power: float) -> Tensor:
    """(X + damping I)^power by an eigendecomposition of the dense matrix."""
    s, U = torch.linalg.eigh(X + damping * torch.eye(len(X), dtype=X.dtype))
    return (U * s**power) @ U.mT


def stepped(model: nn.Module, x: Tensor, **settings: Any) -> tuple[rkfac.KFAC, list[Tensor], list[Tensor]]:
    """One step from a batch: the optimizer, gradients and how far the parameters went."""
    optimizer = rkfac.KFAC(model, **{**FULL, **settings})
    before = [p.detach().clone() for p in model.parameters()]
    model(x).square().sum(-1).mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()
    return optimizer, gradients, [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("relative_to", ["mean", "largest", None])
def test_a_linear_layer_equals_dense_powers(power: float, relative_to: str | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5).double(), torch.randn(30, 6, dtype=torch.float64)
    optimizer, (J, j), (S, s) = stepped(model, x, power=power, damping=0.3, relative_to=relative_to)
    block = optimizer._blocks[""]
    A, G = block.input.dense(), block.output.dense()

    def damping(X: Tensor) -> float:
        sizes = {"mean": float(X.trace()) / len(X), "largest": float(torch.linalg.eigvalsh(X)[-1]), None: 1.0}
        return 0.3 * sizes[relative_to]

    expected = to_power(G, damping(G), power) @ torch.cat([J, j[:, None]], 1) @ to_power(A, damping(A), power)
    torch.testing.assert_close(torch.cat([S, s[:, None]], 1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("power", POWERS)
def test_the_product_rule_equals_dense_powers(power: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5, bias=False).double(), torch.randn(30, 6, dtype=torch.float64)
    settings = {"power": power, "damping": 0.3, "relative_to": None, "damping_rule": "product"}
    optimizer, (J,), (S,) = stepped(model, x, **settings)
    block = optimizer._blocks[""]
    whole = to_power(torch.kron(block.output.dense(), block.input.dense()), 0.3, power)
    torch.testing.assert_close(S, (whole @ J.flatten()).reshape(J.shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("power", POWERS)
def test_norms_and_embeddings_equal_dense_powers(power: float) -> None:
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(4).double(), torch.randn(30, 4, dtype=torch.float64)
    with torch.no_grad():
        norm.bias.normal_()
    optimizer, (J, j), (S, s) = stepped(norm, x, power=power, damping=0.3, relative_to=None)
    blocks = optimizer._blocks[""].factor.dense()
    for unit in range(4):
        expected = to_power(blocks[unit], 0.3, power) @ torch.stack([J[unit], j[unit]])
        torch.testing.assert_close(torch.stack([S[unit], s[unit]]), expected, rtol=1e-9, atol=1e-12)
    embedding = nn.Embedding(7, 4).double()
    optimizer, (J,), (S,) = stepped(embedding, torch.randint(0, 7, (40,)), power=power, damping=0.3, relative_to=None)
    block = optimizer._blocks[""]
    A, G = block.input.dense(), block.output.dense()
    torch.testing.assert_close(S, to_power(A, 0.3, power) @ J @ to_power(G, 0.3, power), rtol=1e-9, atol=1e-12)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)]
    return nn.Sequential(*layers).to(dtype)


def trained(
    optimizer_class: type[rkfac.KFAC], size: float = 1.0, dtype: torch.dtype = torch.float64, **settings: Any
) -> Tensor:
    model, g = network(dtype), torch.Generator().manual_seed(1)
    optimizer = optimizer_class(model, **{"factor_every": 2, "inverse_every": 4, "seed": 0, **settings})
    for _ in range(12):
        x, y = torch.randn(16, 20, generator=g, dtype=torch.float64).to(dtype), torch.randint(0, 3, (16,), generator=g)
        optimizer.zero_grad()
        (size * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", [rkfac.RSKFAC, rkfac.SREKFAC])
def test_at_full_rank_a_sketch_equals_the_exact_one(optimizer: type[rkfac.KFAC]) -> None:
    settings = {"power": -0.5, "damping": 0.01, "lr": 0.05}
    found = trained(optimizer, rank=64, **settings)
    torch.testing.assert_close(found, trained(rkfac.KFAC, **settings), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("graft", ["sgd", "adamw"])
def test_much_damping_is_the_plain_optimizer_at_any_power(graft: str) -> None:
    lr = 0.05 if graft == "sgd" else 1e-3
    ends = [trained(rkfac.RSKFAC, power=power, damping=1e9, graft=graft, lr=lr) for power in (-1.0, -0.5)]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_the_scale_of_the_loss_does_not_matter(size: float) -> None:
    settings = {"power": -0.5, "damping": 0.01, "momentum": 0.9}
    one, other = trained(rkfac.RSKFAC, lr=0.05, **settings), trained(rkfac.RSKFAC, size, lr=0.05 / size, **settings)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_backward_and_step_agree_at_another_power() -> None:
    settings = {"power": -0.5, "damping": 0.01, "lr": 0.05, "rank": 5}
    ends = [trained(rkfac.RSKFAC, apply=how, **settings) for how in ("step", "backward")]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-11)


def test_small_dampings_hold_in_single_precision() -> None:
    for damping in (1e-2, 1e-4, 1e-6):
        settings = {"power": -0.5, "damping": damping, "lr": 0.05}
        wide, narrow = trained(rkfac.RSKFAC, **settings), trained(rkfac.RSKFAC, dtype=torch.float32, **settings)
        assert float((wide - narrow).norm() / wide.norm()) < 1e-2, damping


def test_another_power_belongs_to_another_algorithm() -> None:
    model = nn.Linear(3, 2)
    state = rkfac.RSKFAC(model).state_dict()
    with pytest.raises(ValueError, match=r"power=-0\.5"):
        rkfac.RSKFAC(model, power=-0.5).load_state_dict(state)


@pytest.mark.parametrize("power", [0.0, -1.5, 1.0, float("nan"), "half", True, None])
def test_what_is_no_power_is_refused(power: Any) -> None:
    with pytest.raises(ValueError, match="power"):
        rkfac.RSKFAC(nn.Linear(3, 2), power=power)


def test_what_holds_for_the_natural_gradient_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_clip"):
        rkfac.RSKFAC(nn.Linear(3, 2), power=-0.5, kl_clip=1e-3)
    with pytest.raises(ValueError, match="adaptive_damping"):
        rkfac.RSKFAC(nn.Linear(3, 2), power=-0.5, adaptive_damping=rkfac.LevenbergMarquardt())
    model = nn.Linear(3, 2)
    optimizer = rkfac.RSKFAC(model, power=-0.5)
    before = model.weight.detach().clone()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.param_groups[0]["kl_clip"] = 1e-3
    with pytest.raises(ValueError, match="kl_clip"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_powers_near_zero_work() -> None:
    for power in (-1e-3, -1e-2):
        assert bool(torch.isfinite(trained(rkfac.RSKFAC, power=power, lr=0.05)).all())

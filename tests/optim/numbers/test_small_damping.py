"""Small relative dampings through the optimizer, against a dense float64 solve with the very same float32 averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import averages

SETTINGS: dict[str, Any] = {
    "momentum": 0.5,  # a buffer holds the first direction itself
    "graft": None,
    "relative_to": "largest",
    "factor_start": "unbiased",
    "factor_every": 1,
    "inverse_every": 1,
}


def damped(X: Tensor, damping: float, rank: int) -> Tensor:
    """The leading `rank` modes of X plus damping * largest eigenvalue."""
    s, U = torch.linalg.eigh(X.double())
    s = s.clamp_min(0)
    s[: max(len(s) - rank, 0)] = 0
    return (U * (s + damping * s[-1])) @ U.T


@pytest.mark.parametrize("damping", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("name", ["KFAC", "RSKFAC", "SREKFAC", "Nystrom"])
def test_directions_agree_with_float64_down_to_a_damping_of_1e_5(name: str, damping: float) -> None:
    """Six samples and as many modes: what is discarded is the rounding of the averages."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))
    make = rkfac.KFAC if name == "Nystrom" else getattr(rkfac, name)
    extra = {"decomposition": rkfac.Nystrom()} if name == "Nystrom" else {}
    optimizer = make(model, lr=0.0, damping=damping, rank=6, oversampling=4, **extra, **SETTINGS)
    F.mse_loss(model(torch.randn(6, 40)), torch.randn(6, 20)).backward()
    optimizer.step()
    known = averages(optimizer)
    for index in ("0", "2"):
        layer = model[int(index)]
        J = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1).double()
        rank = 100 if name == "KFAC" else 6
        A, G = (damped(known[f"{index}.{side}"], damping, rank) for side in ("input", "output"))
        expected = torch.linalg.solve(G, torch.linalg.solve(A, J.T).T)
        buffers = [optimizer.state[p]["momentum_buffer"].double() for p in (layer.weight, layer.bias)]
        got = torch.cat([buffers[0], buffers[1][:, None]], dim=1)
        error = float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected))
        assert error < 1e-3, f"layer {index}: {error:.1e}"


@pytest.mark.parametrize("damping", [1e-3, 1e-4, 1e-5])
def test_embeddings_agree_with_float64_down_to_a_damping_of_1e_5(damping: float) -> None:
    model = nn.Sequential(nn.Embedding(12, 40), nn.Flatten(), nn.Linear(40, 5))
    optimizer = stated.RSKFAC(model, lr=0.0, damping=damping, rank=10, oversampling=4, **SETTINGS)
    F.cross_entropy(model(torch.randint(12, (6, 1))), torch.randint(5, (6,))).backward()
    optimizer.step()
    known = averages(optimizer)
    counts = known["0.input"].double()
    J = model[0].weight.grad.double()
    expected = torch.linalg.solve(damped(known["0.output"], damping, 10), J.T).T
    expected = expected / (counts + damping * counts.max())[:, None]
    got = optimizer.state[model[0].weight]["momentum_buffer"].double()
    assert float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected)) < 1e-3


@pytest.mark.parametrize("damping", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_norms_agree_with_float64_down_to_a_damping_of_1e_5(norm: type[nn.Module], damping: float) -> None:
    layer = norm(8)
    optimizer = stated.KFAC(layer, lr=0.0, damping=damping, **SETTINGS)
    F.mse_loss(layer(torch.randn(16, 8)), torch.randn(16, 8)).backward()
    optimizer.step()
    blocks = next(iter(averages(optimizer).values())).double()
    largest = torch.linalg.eigvalsh(blocks).amax()
    J = torch.stack([layer.weight.grad, layer.bias.grad], dim=-1).double()
    expected = torch.linalg.solve(blocks + damping * largest * torch.eye(2, dtype=torch.float64), J)
    got = torch.stack([optimizer.state[p]["momentum_buffer"] for p in (layer.weight, layer.bias)], dim=-1).double()
    assert float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected)) < 1e-3

"""Slow and obvious: factors from one sample at a time, without the package's adapters, hooks and averages.

Rows a are read off the Jacobian of a layer's output with respect to its own weight (dy_c / dW_c is the input patch), rows
g^ from autograd on the loss of a single sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import rkfac
from rkfac.curvature import Block, Categorical, Likelihood


class Mean(nn.Module):
    """Average over the positions of a sample."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


@dataclass(frozen=True)
class Problem:
    """A small model and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.build().double()

    def x(self) -> Tensor:
        torch.manual_seed(2)
        if any(isinstance(m, nn.Embedding) for m in self.build().modules()):
            return torch.randint(0, 5, self.shape)
        return torch.randn(self.shape, dtype=torch.float64)


PROBLEMS = [
    Problem("mlp", lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), (6, 4)),
    Problem("mlp, more samples than width", lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)), (9, 3)),
    Problem("sequence", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (3, 5, 4)),
    Problem("grid", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), Mean(1, 2), nn.Linear(3, 2)), (3, 2, 2, 4)),
    Problem("conv2d", lambda: nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.Tanh(), nn.Conv2d(3, 2, 2)), (4, 2, 6, 5)),
    Problem("conv2d groups", lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh()), (4, 4, 4, 3)),
    Problem("conv2d depthwise", lambda: nn.Sequential(nn.Conv2d(3, 3, 2, groups=3, bias=False)), (4, 3, 4, 3)),
    Problem("conv1d circular", lambda: nn.Sequential(nn.Conv1d(2, 3, 3, 1, 1, padding_mode="circular")), (4, 2, 6)),
    Problem("conv3d", lambda: nn.Sequential(nn.Conv3d(2, 2, 2, dilation=(1, 2, 1))), (3, 2, 3, 4, 3)),
    Problem("embedding", lambda: nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 2)), (4, 5)),
    Problem("embedding padded", lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 2)), (4, 5)),
]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=attrgetter("name"))


def losses(y: Tensor) -> Tensor:
    """A loss a sample, with gradients that differ everywhere."""
    return (y.flatten(1).sin() + y.flatten(1).pow(3) / 3).sum(1)


def kfac(model: nn.Module, **keywords: Any) -> rkfac.KFAC:
    """The paper's K-FAC, but that it moves no parameter, takes statistics at every step and keeps every layer."""
    fixed = {
        "lr": 0.0,
        "graft": None,
        "momentum": 0.0,
        "relative_to": "largest",
        "damping_rule": "factored",
        "eager_start": False,
        "rows": None,
        "exclude": (),
        "kl_clip": None,
        "update_clip": None,
        "factor_start": "unbiased",
        "tail": "trace",
    }
    return rkfac.KFAC(model, **{**fixed, "factor_every": 1, "inverse_every": 1, **keywords})


def statistics(problem: Problem, **keywords: Any) -> rkfac.KFAC:
    """After one step on the mean of `losses`."""
    model = problem.model()
    optimizer = kfac(model, **keywords)
    losses(model(problem.x())).mean().backward()
    optimizer.step()
    return optimizer


def weight_layers(model: nn.Module) -> dict[str, nn.Module]:
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def one_sample(
    model: nn.Module, module: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(input, gradient at the output) of every call of `module` for one sample (x has a leading 1)."""
    calls: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda _, args, y: calls.append((args[0].detach(), y)))
    value = loss(model(x)).sum()
    handle.remove()
    found = torch.autograd.grad(value, [y for _, y in calls])
    return [(a, g) for (a, _), g in zip(calls, found, strict=True)]


def rows(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a (groups, positions, d_in[+1]) and g (groups, positions, d_out) of one sample, from the layer's Jacobian."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    J = jacrev(lambda p: functional_call(module, p, (x,)))(parameters)["weight"][0]
    groups = getattr(module, "groups", 1)
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):  # channels are last: bring them to the front
        J, g = J.movedim(g.ndim - 2, 0), g.movedim(-1, 1)
    g = g[0].reshape(g.shape[1], -1)  # (c_out, positions)
    c_out, positions = g.shape
    J = J.reshape(c_out, positions, *module.weight.shape)
    a = []
    for c in range(0, c_out, c_out // groups):  # the first output channel of every group sees the group's patches
        patch = J[c, ..., c] if isinstance(module, nn.Embedding) else J[c, :, c].flatten(1)
        a.append(torch.cat([patch, patch.new_ones(positions, 1)], dim=1) if "bias" in parameters else patch)
    return torch.stack(a), g.unflatten(0, (groups, -1)).mT


def factors(
    model: nn.Module, module: nn.Module, x: Tensor, sharing: str, loss: Callable[[Tensor], Tensor] = losses
) -> tuple[Tensor, Tensor]:
    """A = 1/(N S^2) sum a a^T and G = S/N sum g^ g^^T, (groups, d, d) each, in plain loops.

    N is what the loss averages over: what the model's last layer has, its images or its rows.
    """
    model, module = copy.deepcopy(
        (model, module)
    )  # copies carry no hooks: the optimizer under test sees nothing of this
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    for n in range(len(x)):
        parts = [rows(module, a, g) for a, g in one_sample(model, module, x[n : n + 1], loss)]
        a, g = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)
        if sharing == "reduce" and not isinstance(module, nn.Embedding):
            a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
        positions = a.shape[1]
        terms = 1 if sharing == "reduce" else last_rows(model, x) // len(x)  # of one sample's loss
        A = A + sum(torch.einsum("gi,gj->gij", a[:, s], a[:, s]) for s in range(positions)) * terms / (
            len(x) * positions**2
        )
        G = G + sum(torch.einsum("gi,gj->gij", g[:, s], g[:, s]) for s in range(positions)) * positions / len(x)
    assert isinstance(A, Tensor)
    assert isinstance(G, Tensor)
    return A, G


def last_rows(model: nn.Module, x: Tensor) -> int:
    """Images or rows that the last layer with a weight sees."""
    last = list(weight_layers(model).values())[-1]
    y = model(x)
    return len(x) if isinstance(last, nn.Conv1d | nn.Conv2d | nn.Conv3d) else y[..., 0].numel()


def block_of(optimizer: rkfac.KFAC, name: str) -> Block:
    """The block of one layer."""
    return optimizer._blocks[name]


def held(optimizer: rkfac.KFAC, name: str) -> tuple[Tensor, Tensor]:
    """The running factors of a layer, dense, with a leading group dimension."""
    A, G = (factor.dense() for factor in block_of(optimizer, name).factors.values())
    return (A[None] if A.ndim == 2 else A), (G[None] if G.ndim == 2 else G)


def block_matrix(optimizer: rkfac.KFAC, name: str) -> Tensor:
    """The layer's curvature as a dense matrix over (weight, bias) flattened as torch flattens them."""
    A, G = (t[0] for t in held(optimizer, name))
    F = torch.kron(G, A)
    if not block_of(optimizer, name).bias:
        return F
    index = torch.arange(len(F)).reshape(len(G), len(A))
    order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
    return F[order][:, order]


def generalized_gauss_newton(model: nn.Module, name: str, x: Tensor, hessian: Callable[[Tensor], Tensor]) -> Tensor:
    """1/N sum J_n^T H(y_n) J_n of one layer's (weight, bias), from the whole model's Jacobian."""
    model = copy.deepcopy(model)
    own = {k: p.detach() for k, p in model.named_parameters() if k.rpartition(".")[0] == name}
    y = model(x).detach()
    jacobian = jacrev(lambda p: functional_call(model, p, (x,)))(own)
    J = torch.cat([j.reshape(len(x), y[0].numel(), -1) for j in jacobian.values()], dim=-1)
    H = torch.stack([hessian(y[n].flatten()) for n in range(len(x))])
    return torch.einsum("nci,ncd,ndj->ij", J, H, J) / len(x)


class Enumerated(Likelihood):
    """Deterministic 'draws', one a column of the exact output Fisher's square root: their mean has no noise."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.turn = 0

    def terms(self, output: Tensor) -> int:
        return len(output)

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        flat = output.flatten(1)
        d = flat.shape[1]
        column = torch.zeros_like(flat)
        column[:, self.turn] = 1
        if self.kind == "categorical":
            p = flat.softmax(-1)
            column = (d * p[:, self.turn, None]).sqrt() * (p - column)
        else:
            column = d**0.5 * column
        self.turn += 1
        return column.reshape(output.shape)


def exact_fisher(model: nn.Module, x: Tensor, kind: str, **keywords: Any) -> rkfac.KFAC:
    """K-FAC whose running factors hold the expectation over the model's own targets, without sampling noise."""
    optimizer = kfac(model, fisher="mc", likelihood=Enumerated(kind), **keywords)
    for k in range(_width(model, x)):
        optimizer.param_groups[0]["factor_decay"] = k / (k + 1)  # the plain mean of all turns
        optimizer.zero_grad()
        model(x).sum().backward()  # any loss: it says which forward counts, not what is counted
        optimizer.step()
    return optimizer


def _width(model: nn.Module, x: Tensor) -> int:
    model.eval()
    with torch.no_grad():
        width = model(x)[0].numel()
    model.train()
    return width


def softmax_fisher(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return torch.diag(p) - torch.outer(p, p)


def identity(output: Tensor) -> Tensor:
    return torch.eye(len(output), dtype=output.dtype)


class Recorded(Likelihood):
    """Categorical, remembering what it drew."""

    def __init__(self) -> None:
        self.inner = Categorical()
        self.drawn: list[Tensor] = []

    def terms(self, output: Tensor) -> int:
        return self.inner.terms(output)

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        self.drawn.append(self.inner.draw_gradient(output, generator))
        return self.drawn[-1]

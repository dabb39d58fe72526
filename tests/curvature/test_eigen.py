"""EK-FAC's second moments against gradients of one sample at a time, and its curvature against explicit Fisher matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from curvature.brute import Problem, each_problem, last_rows, losses, one_sample, rows, weight_layers
from linalg.test_energies import completed, pooled
from rkfac.curvature.block.eigen import EigenBlock
from rkfac.curvature.randomness import subset
from rkfac.linalg import Diagonal, LowRank

SKETCH: dict[str, Any] = {"decomposition": rkfac.RSVD(), "rank": 2, "oversampling": 1}
each_basis = pytest.mark.parametrize("basis", [{}, SKETCH], ids=["exact", "truncated"])


def ekfac(model: nn.Module, **keywords: Any) -> rkfac.EKFAC:
    """Moves no parameter, takes statistics at every step, keeps the first basis."""
    fixed: dict[str, Any] = {"lr": 0.0, "graft": None, "momentum": 0.0, "eager_start": False, "rows": None}
    return rkfac.EKFAC(model, **{**fixed, "factor_every": 1, "inverse_every": 1000, "factor_decay": 0.0, **keywords})


def seen(model: nn.Module, optimizer: rkfac.EKFAC, x: Tensor, steps: int = 2) -> rkfac.EKFAC:
    """The first step makes a basis, the second has moments in it."""
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model(x)).mean().backward()
        optimizer.step()
    return optimizer


def block_of(optimizer: rkfac.EKFAC, name: str) -> EigenBlock:
    block = optimizer._blocks[name]
    assert isinstance(block, EigenBlock)
    return block


def lows(block: EigenBlock) -> list[tuple[LowRank, LowRank]]:
    """(G, A) of each group; one-hot inputs have the unit vectors as their basis."""
    G, A = block.output.low, block.input.low
    if isinstance(A, Diagonal):
        A = LowRank(torch.eye(A.dim, dtype=torch.float64), A.s)
    if G.U.ndim == 2:
        return [(G, A)]
    return [tuple(LowRank(low.U[k], low.s[k]) for low in (G, A)) for k in range(len(G.U))]


def means(block: EigenBlock) -> Tensor:
    found = block.energies.means
    return found if found.ndim == 3 else found[None]


def of_each(model: nn.Module, module: nn.Module, x: Tensor, sharing: str) -> list[Tensor]:
    """Gradients (groups, d_G, d_A) of what counts as a sample, from losses of one sample at a time."""
    found = []
    whole = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or (
        sharing == "reduce" and not isinstance(module, nn.Embedding)
    )
    for n in range(len(x)):
        for a, g in (rows(module, *call) for call in one_sample(model, module, x[n : n + 1], losses)):
            if whole:
                found.append(g.mT @ a)
            else:
                found += [g[:, s, :, None] * a[:, s, None, :] for s in range(a.shape[1])]
    return found


@each_problem
@each_basis
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_moments_are_the_mean_squares_of_every_samples_gradient(
    problem: Problem, basis: dict[str, Any], sharing: str
) -> None:
    model, x = problem.model(), problem.x()
    optimizer = seen(model, ekfac(model, weight_sharing=sharing, **basis), x)
    plain = problem.model()
    # The loss is the mean over len(x) of the samples' own; N is what the optimizer takes its loss to average over.
    N = len(x) if sharing == "reduce" else last_rows(plain, x)
    for name, module in weight_layers(plain).items():
        block = block_of(optimizer, name)
        gradients = [J / len(x) for J in of_each(plain, module, x, sharing)]
        for k, (G, A) in enumerate(lows(block)):
            Q_G, Q_A = completed(G), completed(A)
            squares = sum(N * (Q_G.mT @ J[k] @ Q_A).square() for J in gradients)
            assert squares.max() > 0
            torch.testing.assert_close(means(block)[k], pooled(squares, (G.rank, A.rank)), rtol=1e-8, atol=1e-12)
            total = sum(N * J[k].square().sum() for J in gradients)
            torch.testing.assert_close(block.energies.trace().reshape(-1)[k], total)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_the_fisher_matrix_is_no_further_than_from_k_fac() -> None:
    """F_EK is the nearest matrix that is diagonal in the Kronecker basis, and K-FAC's is one of these."""
    model, x = mlp(), torch.randn(9, 4, dtype=torch.float64)
    optimizer = seen(model, ekfac(model), x)
    plain = mlp()
    for name, module in weight_layers(plain).items():
        block = block_of(optimizer, name)
        flat = torch.stack([J[0].flatten() for J in of_each(plain, module, x, "expand")])
        fisher = flat.mT @ flat / len(x)
        ((G, A),) = lows(block)
        Q = torch.kron(completed(G), completed(A))
        M = block.energies.means
        spread = M[[min(i, G.rank) for i in range(G.dim)]][:, [min(j, A.rank) for j in range(A.dim)]]
        ours = Q @ torch.diag(spread.flatten()) @ Q.mT
        K = torch.kron(block.output.dense(), block.input.dense())
        nearest, kronecker = (torch.linalg.matrix_norm(fisher - X) for X in (ours, K))
        assert nearest <= kronecker
        torch.testing.assert_close(ours.trace(), fisher.trace())


@each_basis
@pytest.mark.parametrize("relative_to", ["mean", "largest", None])
@pytest.mark.parametrize("moments", ["samples", "running"])
def test_the_direction_undoes_the_damped_curvature(
    basis: dict[str, Any], relative_to: str | None, moments: str
) -> None:
    """multiply is the matrix that direction solves with, for every kind of layer."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 3)]
    model, x = nn.Sequential(*layers).double(), torch.randn(40, 2, 5, 5, dtype=torch.float64)
    optimizer = seen(model, ekfac(model, damping=0.2, relative_to=relative_to, moments=moments, **basis), x, 3)
    group = optimizer.param_groups[0]
    for name in weight_layers(model):
        block = block_of(optimizer, name)
        gradients = tuple(p.grad for p in block.parameters)
        direction = block.direction(gradients, group)
        S = tuple(torch.zeros_like(g) for g in gradients)
        for index, part in enumerate(S):
            direction.add_to(index, part, 1.0, [(gradients[index], 1.0)])
        for found, expected in zip(block.multiply(S, group), gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(
            torch.as_tensor(direction.inner, dtype=torch.float64),
            sum((s * g).sum() for s, g in zip(S, gradients, strict=True)),
        )


def test_damping_is_measured_in_all_moments_or_the_largest() -> None:
    model, x = mlp(), torch.randn(9, 4, dtype=torch.float64)
    for measure in ("mean", "largest", None):
        optimizer = seen(model, ekfac(model, relative_to=measure, damping=0.3, **SKETCH), x)
        block = block_of(optimizer, "0")
        ((G, A),) = lows(block)
        M = block.energies.means
        whole = M[[min(i, G.rank) for i in range(G.dim)]][:, [min(j, A.rank) for j in range(A.dim)]]
        expected = 0.3 * {"mean": whole.mean(), "largest": M[: G.rank, : A.rank].max(), None: 1.0}[measure]
        assert optimizer.report()[0].damping_input == pytest.approx(float(expected), rel=1e-12)


def held(model: nn.Module, optimizer: rkfac.EKFAC) -> Tensor:
    return torch.cat([block_of(optimizer, name).energies.means.flatten() for name in weight_layers(model)])


@pytest.mark.parametrize("moments", ["samples", "running"])
@pytest.mark.parametrize("how", ["two backward passes", "a summed loss", "a scaled loss"])
def test_what_a_loss_is_multiplied_by_is_undone(how: str, moments: str) -> None:
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    found = []
    for other in (False, True):
        model = mlp()
        summed = other and how == "a summed loss"
        optimizer = ekfac(model, moments=moments, loss_average="sum" if summed else "batch")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=other and how == "a scaled loss")
        for _ in range(3):
            optimizer.zero_grad()
            parts = (5, 7) if other and how == "two backward passes" else (12,)
            for a, b in zip(x.split(parts), y.split(parts), strict=True):
                loss = F.cross_entropy(model(a), b, reduction="sum")
                scaler.scale(loss if summed else loss / 12).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(held(model, optimizer))
    torch.testing.assert_close(*found)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def test_calls_of_one_pass_count_as_samples_of_their_own() -> None:
    """As positions do in K-FAC: what the two calls of a sample have in common is left out, and nothing is counted twice."""
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(11, 4, dtype=torch.float64)
    plain = Twice().double()
    plain.load_state_dict(model.state_dict())
    optimizer = seen(model, ekfac(model), x)
    block = block_of(optimizer, "inner")
    total = sum(J[0].square().sum() for J in of_each(plain, plain.inner, x, "expand")) / len(x)
    torch.testing.assert_close(block.energies.trace(), total)


@pytest.mark.parametrize("kind", ["linear", "conv", "embedding"])
def test_drawn_samples_stand_for_the_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice is as likely as another, so that the mean over all of them must be the moments of all samples."""
    import rkfac.curvature.block.base as room

    monkeypatch.setattr(room, "LEAST_SAMPLES", 1)
    torch.manual_seed(2)
    model: nn.Module = {
        "linear": lambda: nn.Sequential(nn.Linear(3, 2)),
        "conv": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()),
        "embedding": lambda: nn.Sequential(nn.Embedding(5, 3)),
    }[kind]().double()
    shape = {"linear": (6, 3), "conv": (6, 2, 3, 3), "embedding": (6,)}[kind]
    x = torch.tensor([0, 3, 3, 1, 4, 3]) if kind == "embedding" else torch.randn(shape, dtype=torch.float64)
    limit = 2 * (4 if kind == "conv" else 1)  # two samples
    total: Tensor | float = 0.0
    whole = held(model, seen(model, ekfac(model), x))
    choices = [torch.tensor([i, j]) for i in range(6) for j in range(i + 1, 6)]
    for choice in choices:
        optimizer = seen(model, ekfac(model), x, 1)  # all have the same basis
        object.__setattr__(optimizer._settings, "rows", limit)
        asked = []

        def chosen(n: int, m: int, generator: Any, choice: Tensor = choice, asked: list[Any] = asked) -> Tensor:
            asked.append((n, m))
            return choice if (n, m) == (6, 2) else subset(n, m, generator)

        monkeypatch.setattr(room, "subset", chosen)
        total = total + held(model, seen(model, optimizer, x, 1)) / len(choices)
        assert (6, 2) in asked
    assert isinstance(total, Tensor)
    torch.testing.assert_close(total, whole)


def test_a_chunk_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import rkfac.curvature.block.eigen as room

    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(7, 2, 3, 3, dtype=torch.float64)
    whole = held(model, seen(model, ekfac(model, **SKETCH), x))
    monkeypatch.setattr(room, "MAX_CHUNK", 300)
    torch.testing.assert_close(held(model, seen(model, ekfac(model, **SKETCH), x)), whole)


def test_every_position_is_a_sample_where_the_loss_averages_over_all() -> None:
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Conv2d(2, 3, 2)).double(), torch.randn(7, 2, 3, 3, dtype=torch.float64)
    optimizer = seen(model, ekfac(model, loss_average="tokens"), x)
    a, g = zip(*(rows(model[0], *one_sample(model, model[0], x[n : n + 1], losses)[0]) for n in range(7)), strict=True)
    total = (torch.cat(a, 1).square().sum(-1) * (torch.cat(g, 1) / 7).square().sum(-1)).sum() * 28
    torch.testing.assert_close(block_of(optimizer, "0").energies.trace(), total)

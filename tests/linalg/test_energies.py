"""Second moments in a pair of bases against dense matrices in completed bases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rkfac.linalg import Diagonal, Energies, LowRank, eigh, energies, preconditioner, product
from rkfac.linalg.multipliers import Multipliers

from .matrices import psd

D_G, D_A = 5, 7
RANKS = [(5, 7), (3, 4), (5, 2), (1, 7), (4, 6)]
each_rank = pytest.mark.parametrize("ranks", RANKS, ids=str)


def low(d: int, rank: int, seed: int, dtype: torch.dtype = torch.float64) -> LowRank:
    whole = eigh(psd(d, seed=seed), tail="trace").truncate(rank)
    return LowRank(whole.U.to(dtype), whole.s, whole.tail)


def bases(ranks: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[LowRank, LowRank]:
    return low(D_G, ranks[0], seed, dtype), low(D_A, ranks[1], seed + 1, dtype)


def completed(basis: LowRank) -> Tensor:
    """The kept modes and any others that make them a basis of everything."""
    U = torch.linalg.qr(basis.U.double())[0] * 1.0
    rest = torch.eye(basis.dim, dtype=torch.float64) - U @ U.mT
    return torch.cat([basis.U.double(), torch.linalg.svd(rest)[0][:, : basis.dim - basis.rank]], dim=1)


def pooled(squares: Tensor, ranks: tuple[int, int]) -> Tensor:
    """d_G x d_A numbers as means of four blocks, in plain loops."""
    g, a = ranks
    out = torch.zeros(g + 1, a + 1, dtype=torch.float64)
    for i in range(g + 1):
        for j in range(a + 1):
            rows = squares[i : i + 1] if i < g else squares[g:]
            cell = rows[:, j] if j < a else rows[:, a:]
            out[i, j] = cell.mean() if cell.numel() else 0.0
    return out


def spread(means: Tensor, ranks: tuple[int, int]) -> Tensor:
    """And back: every coordinate has the mean of its block."""
    g = [min(i, ranks[0]) for i in range(D_G)]
    a = [min(j, ranks[1]) for j in range(D_A)]
    return means[g][:, a]


def dense(J: Tensor, G: LowRank, A: LowRank) -> Tensor:
    return pooled((completed(G).mT @ J @ completed(A)).square(), (G.rank, A.rank))


def some(means: Tensor, G: LowRank, A: LowRank, weight: float = 0.0) -> Energies:
    return Energies(means, (G.dim - G.rank, A.dim - A.rank), torch.tensor(weight, dtype=torch.float64))


def gradients(positions: int, n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, positions, D_G, dtype=torch.float64), torch.randn(n, positions, D_A, dtype=torch.float64)


@each_rank
@pytest.mark.parametrize("positions", [1, 3])
def test_rows_give_the_squares_of_every_samples_gradient(ranks: tuple[int, int], positions: int) -> None:
    (G, A), (g, a) = bases(ranks), gradients(positions)
    expected = sum(dense(g[n].mT @ a[n], G, A) for n in range(len(g)))
    found = energies.of_rows(G, A, g, a)
    torch.testing.assert_close(found, expected)
    norms = sum((g[n].mT @ a[n]).square().sum() for n in range(len(g)))
    torch.testing.assert_close(some(found, G, A).trace(), norms)  # the trace identity
    torch.testing.assert_close(some(found, G, A).mean(), norms / (D_G * D_A))


@pytest.mark.parametrize("positions", [1, 3])
def test_groups_are_layers_of_their_own(positions: int) -> None:
    pairs = [bases((3, 4), seed) for seed in (0, 5)]
    G, A = (LowRank(*(torch.stack([getattr(p[i], k) for p in pairs]) for k in ("U", "s", "tail"))) for i in (0, 1))
    rows = [gradients(positions) for _ in pairs]
    g, a = (torch.stack([r[i] for r in rows]) for i in (0, 1))
    found = energies.of_rows(G, A, g, a)
    J = torch.randn(2, D_G, D_A, dtype=torch.float64)
    one = energies.of_matrix(G, A, J)
    for k, (own, (x, y)) in enumerate(zip(pairs, rows, strict=True)):
        torch.testing.assert_close(found[k], energies.of_rows(*own, x, y))
        torch.testing.assert_close(one[k], energies.of_matrix(*own, J[k]))
    carried = some(found, G, A).carried(G.shares_of(G), A.shares_of(A))
    torch.testing.assert_close(carried.means, found)
    assert carried.trace().shape == carried.largest.shape == (2,)


@each_rank
def test_a_matrix_gives_its_own_squares(ranks: tuple[int, int]) -> None:
    G, A = bases(ranks)
    J = torch.randn(D_G, D_A, dtype=torch.float64)
    torch.testing.assert_close(energies.of_matrix(G, A, J), dense(J, G, A))


@pytest.mark.parametrize("rank", [5, 2])
def test_lookups_are_one_hot_rows(rank: int) -> None:
    G, tokens = low(D_G, rank, 0), torch.tensor([3, 0, 3, 6, 3])
    g = torch.randn(5, D_G, dtype=torch.float64)
    onehot = torch.nn.functional.one_hot(tokens, D_A).double()
    whole = LowRank(torch.eye(D_A, dtype=torch.float64), torch.ones(D_A, dtype=torch.float64))
    expected = energies.of_rows(G, whole, g[:, None], onehot[:, None])
    torch.testing.assert_close(energies.of_lookups(G, D_A, tokens, g), expected)
    J = torch.randn(D_G, D_A, dtype=torch.float64)
    diagonal = Diagonal(torch.ones(D_A, dtype=torch.float64))
    torch.testing.assert_close(energies.of_matrix(G, diagonal, J), energies.of_matrix(G, whole, J))


@each_rank
@pytest.mark.parametrize("to", RANKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_another_basis_gets_the_diagonal_of_the_rotated_matrix(
    ranks: tuple[int, int], to: tuple[int, int], dtype: torch.dtype
) -> None:
    """diag(M) in the old coordinates, as a d_G d_A matrix, rotated: its diagonal in the new ones, pooled."""
    G, A = bases(ranks, 0, dtype)
    new_G, new_A = bases(to, 9, dtype)
    means = energies.of_matrix(G, A, torch.randn(D_G, D_A, dtype=dtype))
    before = some(means, G, A)
    after = before.carried(new_G.shares_of(G), new_A.shares_of(A))
    rotation = torch.kron(completed(new_G).mT @ completed(G), completed(new_A).mT @ completed(A))
    whole = rotation @ torch.diag(spread(means, ranks).flatten()) @ rotation.mT
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(after.means, pooled(whole.diagonal().reshape(D_G, D_A), to), **close)
    torch.testing.assert_close(after.trace(), before.trace(), rtol=1e-12, atol=0)
    assert after.beyond == (D_G - to[0], D_A - to[1])


@each_rank
@pytest.mark.parametrize("power", [-1.0, -0.5, 1.0])
def test_the_solve_is_the_dense_formula_with_means_that_are_constant_in_blocks(
    ranks: tuple[int, int], power: float
) -> None:
    G, A = bases(ranks)
    held = some(energies.of_rows(G, A, *gradients(1)), G, A)
    J, damping = torch.randn(D_G, D_A, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    Q_G, Q_A = completed(G), completed(A)
    expected = Q_G @ ((Q_G.mT @ J @ Q_A) * (spread(held.means, ranks) + damping) ** power) @ Q_A.mT
    found = preconditioner(A, G, held.multipliers(damping, power)).solve(J, None).dense(J, None)
    torch.testing.assert_close(found, expected)


@each_rank
def test_a_kronecker_product_of_moments_is_the_product_rule(ranks: tuple[int, int]) -> None:
    G, A = bases(ranks)
    damping = torch.tensor(0.3, dtype=torch.float64)
    mine, theirs = energies.of_product(G, A, 0.0).multipliers(damping), product(G, A, damping)
    for name in ("both", "output", "input", "rest"):
        a, b = (getattr(m, name) * m.scale for m in (mine, theirs))
        torch.testing.assert_close(a, b)
    assert isinstance(mine, Multipliers)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1.0, 1e12])
@pytest.mark.parametrize("other", [1e-18, 1.0, 1e12])
@pytest.mark.parametrize("positions", [1, 3])
def test_float32_rows_of_any_size_are_squared_as_in_float64(scale: float, other: float, positions: int) -> None:
    g, a = gradients(positions)
    g, a = (g * scale).float(), (a * other).float()
    double = energies.of_rows(*bases((3, 4)), g.double(), a.double())
    single = energies.of_rows(*bases((3, 4), dtype=torch.float32), g, a)
    assert bool((double > 0).all())
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-6 * float(double.max()))
    J = (g[0].mT @ a[0]).float()
    if float(J.abs().max()) > 1e-30:  # else float32 has no digits left
        single, double = (energies.of_matrix(*bases((3, 4), dtype=t), J.to(t)) for t in (torch.float32, torch.float64))
        torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-6 * float(double.max()))


def test_an_average_without_a_start_is_the_weighted_mean_of_what_it_saw() -> None:
    G, A = bases((3, 4))
    seen = [energies.of_matrix(G, A, torch.randn(D_G, D_A, dtype=torch.float64)) for _ in range(4)]
    held, decays = energies.of_product(G, A, 0.0), [0.9, 0.5, 0.9, 0.7]
    for new, decay in zip(seen, decays, strict=True):
        held = held.blended(new, decay)
    weights = [(1 - d) * math.prod(decays[k + 1 :]) for k, d in enumerate(decays)]
    expected = sum(w * m for w, m in zip(weights, seen, strict=True)) / sum(weights)
    torch.testing.assert_close(held.means, expected)
    first = energies.of_product(G, A, 1.0)
    torch.testing.assert_close(first.blended(seen[0], 0.9).means, 0.9 * first.means + 0.1 * seen[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_changes_nothing(bad: float) -> None:
    G, A = bases((3, 4))
    held = energies.of_product(G, A, 0.5)
    J = torch.randn(D_G, D_A, dtype=torch.float64)
    J[1, 2] = bad
    after = held.blended(energies.of_matrix(G, A, J), 0.9)
    assert torch.equal(after.means, held.means)
    assert torch.equal(after.weight, held.weight)


def test_moments_that_fade_away_become_zero_and_not_the_smallest_number_there_is() -> None:
    G, A = bases((3, 4))
    held = energies.of_product(G, A, 1.0)
    for _ in range(3):
        held = held.blended(torch.zeros_like(held.means), 1e-100)
    assert not held.means.any()


def test_modes_of_one_eigenvalue_belong_to_the_rest() -> None:
    """Solvers return any of them; whatever is measured along one says nothing."""
    X = psd(9, rank=4)
    found = eigh(X, tail="zero").distinct()
    assert found.rank == 4
    torch.testing.assert_close(found.dense(), X)
    shifted = eigh(X, tail="trace").shifted(0.5).distinct()
    assert shifted.rank == 4
    torch.testing.assert_close(shifted.dense(), X + 0.5 * torch.eye(9, dtype=torch.float64))
    assert eigh(psd(9, rank=8), tail="zero").distinct().rank == 9  # one mode can be told from all others
    assert eigh(torch.zeros(4, 4, dtype=torch.float64), tail="zero").distinct().rank == 1
    even = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(eigh(even, tail="zero").distinct().dense(), even)
    sketch = eigh(X, tail="zero").truncate(6)  # a sketch wider than the matrix's rank
    assert sketch.distinct().rank == 4
    assert eigh(psd(9), tail="trace").truncate(3).distinct().rank == 3

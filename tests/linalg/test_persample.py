"""Gradients sample by sample: formed rows and products of factors answer alike, and the inverse is the dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rkfac.linalg import DecompositionError, Everything, Formed, Grid, Outer, Places, Sample, woodbury


def outer(dtype: torch.dtype = torch.float64, shape: tuple[int, int, int] = (2, 4, 5), n: int = 6, s: int = 3) -> Outer:
    c, d_G, d_A = shape
    return Outer(torch.randn(c, n, s, d_G).to(dtype), torch.randn(c, n, s, d_A).to(dtype))


def written_out(rows: Outer) -> Tensor:
    """U by loops."""
    c, n, s, _ = rows.G.shape
    made = torch.zeros(n, *rows.shape, dtype=rows.G.dtype)
    for sample in range(n):
        for group in range(c):
            for position in range(s):
                made[sample, group] += torch.outer(rows.G[group, sample, position], rows.X[group, sample, position])
    return made.flatten(1)


@pytest.mark.parametrize("shape", [(1, 4, 5), (2, 4, 5), (1, 5, 2), (3, 1, 1)])
@pytest.mark.parametrize("formed", [False, True])
def test_products_and_rows_answer_alike(shape: tuple[int, int, int], formed: bool) -> None:
    products = outer(shape=shape)
    U, J, b = written_out(products), torch.randn(shape).double(), torch.randn(6).double()
    rows = products.formed() if formed else products
    assert (rows.shape, rows.entries) == (shape, U.shape[1])
    torch.testing.assert_close(rows.kernel(), U @ U.T)
    torch.testing.assert_close(rows.times(J), U @ J.flatten())
    before = J.clone()
    torch.testing.assert_close(rows.back(b, J).flatten(), J.flatten() + U.T @ b)
    assert torch.equal(J, before)
    places = torch.arange(0, U.shape[1], 2)
    torch.testing.assert_close(rows.columns(places).U, U[:, ::2])


def test_a_kernel_made_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from rkfac.linalg import persample

    rows = outer(n=7)
    whole = rows.kernel()
    monkeypatch.setattr(persample, "CHUNK", 200)
    torch.testing.assert_close(rows.kernel(), whole)


def samples_of(rows: Outer) -> dict[str, Sample]:
    _, d_G, d_A = rows.shape
    return {
        "everything": Everything(),
        "entries": Places(torch.tensor([0, 3, 7, 20])),
        "grid": Grid(torch.tensor([1, 3]), torch.tensor([0, 2, 4])),
        "rows alone": Grid(torch.tensor([2]), None),
        "all of a grid": Grid(torch.arange(d_G), torch.arange(d_A)),
    }


@pytest.mark.parametrize("name", ["everything", "entries", "grid", "rows alone", "all of a grid"])
@pytest.mark.parametrize("damping", [1e-3, 1.0, 1e6])
def test_the_solution_is_that_of_dense_matrices(name: str, damping: float) -> None:
    rows, J = outer(), torch.randn(2, 4, 5).double()
    sample = samples_of(rows)[name]
    U, chosen = written_out(rows), sample.pick(torch.arange(40).reshape(2, 4, 5)).flatten()
    solver = woodbury(rows, sample, False, "a test")
    assert solver.share == 40 / len(chosen)
    U_s, g_s = U[:, chosen] * solver.share**0.5, J.flatten()[chosen] * solver.share**0.5
    eye = torch.eye(6).double()
    expected = J.flatten() - U.T @ torch.linalg.solve(damping * eye + U_s @ U_s.T, U_s @ g_s)
    got = solver.solve(J, torch.tensor(damping).double()).flatten()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(solver.multiply(J).flatten(), U.T @ (U @ J.flatten()))
    if len(chosen) == 40:
        direct = damping * torch.linalg.solve(damping * torch.eye(40).double() + U.T @ U, J.flatten())
        torch.testing.assert_close(got, direct, rtol=1e-8, atol=1e-10)


def test_the_stand_in_for_the_product_is_exact_for_one_sample_and_for_samples_all_alike() -> None:
    one, J = outer(n=1), torch.zeros(2, 4, 5).double()
    for rows, b in (
        (one, torch.tensor([-0.7]).double()),
        (Outer(one.G.expand(2, 3, 3, 4), one.X.expand(2, 3, 3, 5)), torch.tensor([0.5, 0.1, 2.0]).double()),
    ):
        torch.testing.assert_close(torch.baddbmm(J, *rows.mixed(b)), rows.back(b, J))
    assert torch.equal(torch.baddbmm(J, *outer().mixed(torch.zeros(6).double())), J)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leading_singular_directions_are_the_best_of_their_number(dtype: torch.dtype) -> None:
    rows = outer(dtype, s=5)
    assert rows.shortened(5, "a test") is rows
    for p in (1, 2, 4):
        short = rows.shortened(p, "a test")
        assert short.G.shape[2] == short.X.shape[2] == p
        for c in range(2):
            for n in range(6):
                left, sigma, right = torch.linalg.svd(rows.G[c, n], full_matrices=False)
                best = (left[:, :p] * sigma[:p]) @ right[:p]
                torch.testing.assert_close(short.G[c, n].T @ short.X[c, n], best.T @ rows.X[c, n], rtol=1e-4, atol=1e-4)
    # Four channels have four directions at five positions: nothing is lost.
    torch.testing.assert_close(rows.shortened(4, "a test").formed().U, rows.formed().U, rtol=1e-4, atol=1e-4)


def test_singular_directions_do_not_hang_on_signs_and_null_vectors() -> None:
    rows = outer(s=5)
    rows.G[:, 0, 1:] = 0  # one direction alone
    rows.G[:, 1] = 0  # none
    short, mirrored = rows.shortened(2, "a test"), Outer(-rows.G, rows.X).shortened(2, "a test")
    torch.testing.assert_close(mirrored.G, -short.G)
    torch.testing.assert_close(mirrored.X, short.X)
    assert not short.X[:, 0, 1].any()
    assert not short.X[:, 1].any()


def test_modes_that_rounding_made_are_not_inverted() -> None:
    """Rows twice and a damping far below float32's digits: without care the direction is rounding noise."""
    rows, J = outer(torch.float32, shape=(1, 6, 7), n=4, s=1), torch.randn(1, 6, 7)
    twice = Outer(torch.cat([rows.G, rows.G], 1) / 2**0.5, torch.cat([rows.X, rows.X], 1))
    U = written_out(Outer(rows.G.double(), rows.X.double()))
    Q = torch.linalg.qr(U.T).Q
    expected = J.double().flatten() - Q @ (Q.T @ J.double().flatten())  # the damping is as good as zero
    got = woodbury(twice, Everything(), False, "a test").solve(J, torch.tensor(1e-12).double())
    torch.testing.assert_close(got.double().flatten(), expected, rtol=1e-3, atol=1e-4)


def test_rows_of_zeros_leave_the_gradient_as_it_is() -> None:
    rows, J = Formed(torch.zeros(3, 8), (1, 2, 4)), torch.randn(1, 2, 4)
    assert torch.equal(woodbury(rows, Everything(), False, "a test").solve(J, torch.tensor(1.0).double()), J)


def test_rows_that_are_not_finite_are_no_basis() -> None:
    with pytest.raises(DecompositionError, match="a test"):
        woodbury(Formed(torch.full((3, 8), float("nan")), (1, 2, 4)), Everything(), False, "a test")

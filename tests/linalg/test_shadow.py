"""Shadows on kept modes: of a matrix, of the rows it is the sum of, of mixtures; and what a look along two directions shows."""

from __future__ import annotations

import pytest
import torch

from rkfac.linalg import Modes


def modes(dtype: torch.dtype = torch.float64) -> Modes:
    g = torch.Generator().manual_seed(0)
    U_G, U_A = (torch.linalg.qr(torch.randn(d, r, generator=g, dtype=torch.float64))[0] for d, r in ((9, 4), (8, 3)))
    return Modes(U_G.to(dtype), U_A.to(dtype), 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_rows_matrix_and_look_agree(bias: bool, dtype: torch.dtype, bound: float) -> None:
    m, generator = modes(dtype), torch.Generator().manual_seed(2)
    g, a = (torch.randn(5, d, generator=generator, dtype=torch.float64).to(dtype) for d in (9, 8))
    whole = g.mT @ a
    J, j = (whole[:, :-1], whole[:, -1]) if bias else (whole, None)
    rows = m.of_rows(g, a[:, :-1] if bias else a, a[:, -1] if bias else None)
    matrix = m.of(J, j)
    for found in (rows, matrix):
        torch.testing.assert_close(found.output, m.U_G.mT @ whole, atol=bound, rtol=bound)
        torch.testing.assert_close(found.input, whole @ m.U_A, atol=bound, rtol=bound)
        torch.testing.assert_close(m.seen(found), m.looked_at(J, j), atol=10 * bound, rtol=10 * bound)


def test_mixtures_are_linear() -> None:
    m, generator = modes(), torch.Generator().manual_seed(3)
    J, H = (torch.randn(9, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mixed, whole = m.of(J, None).mixed(2.0, m.of(H, None), -0.3), m.of(2 * J - 0.3 * H, None)
    torch.testing.assert_close(mixed.output, whole.output)
    torch.testing.assert_close(mixed.input, whole.input)
    assert m.of(J, None).mixed(3.0, None, 1.0).output.equal(3 * m.of(J, None).output)


def test_a_look_shows_any_change() -> None:
    m, generator = modes(), torch.Generator().manual_seed(4)
    J = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    before = m.looked_at(J, None)
    for index in range(J.numel()):
        changed = J.clone()
        changed.view(-1)[index] += 1e-6
        assert float((m.looked_at(changed, None) - before).norm()) > 1e-9

from __future__ import annotations

import math

import pytest
import torch

from rkfac import theory


def test_the_papers_two_worked_numbers() -> None:
    assert theory.retained_modes(rho=0.95, n=256, alpha=0.1, epsilon=0.03) == 29184
    assert theory.retained_modes(rho=0.5, n=256, alpha=0.1, epsilon=0.03) == 2304
    assert theory.retained_modes(rho=0.95, n=256, d=4609, alpha=0.1, epsilon=0.03) == 4609


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
def test_the_bound_holds_for_an_actual_average(rho: float) -> None:
    d, n, epsilon = 400, 2, 0.05
    M = torch.zeros(d, d, dtype=torch.float64)
    largest = 0.0
    for _ in range(200):
        columns = torch.randn(d, n, dtype=torch.float64)
        largest = max(largest, float(torch.linalg.matrix_norm(columns, 2)) ** 2)
        M = rho * M + (1 - rho) * columns @ columns.mT
    values = torch.linalg.eigvalsh(M)
    alpha = min(float(values[-1]) / largest, 1 - 1e-9)
    count = int((values >= epsilon * values[-1]).sum())
    assert count <= theory.retained_modes(rho=rho, n=n, d=d, alpha=alpha, epsilon=epsilon)
    assert theory.retained_modes(rho=rho, n=n, d=d, alpha=alpha, epsilon=epsilon) == min(
        math.ceil(math.log(alpha * epsilon) / math.log(rho)) * n, d
    )


@pytest.mark.parametrize("argument, value", [("rho", 1.0), ("alpha", 0.0), ("epsilon", 2.0)])
def test_values_outside_the_proposition_are_refused_by_name(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        theory.retained_modes(**{argument: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive"):
        theory.retained_modes(n=0)

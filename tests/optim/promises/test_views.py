"""A Linear layer's output on sequences is a view: an in-place activation behind it must not hide its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optim import stated
from optim.problems import averages


class Sequences(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.last, self.in_place = nn.Linear(6, 8), nn.Linear(8, 3), in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h.relu_() if self.in_place else h.relu()).mean(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "mc"])
def test_an_in_place_activation_changes_no_statistic(fisher: Any, sharing: Any) -> None:
    found = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = Sequences(in_place).double()
        optimizer = stated.RSKFAC(model, lr=0.1, fisher=fisher, weight_sharing=sharing, factor_every=1, rank=3)
        for _ in range(2):
            optimizer.zero_grad()
            x, y = torch.randn(5, 4, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert all(report.covered for report in optimizer.report())
        found.append(averages(optimizer))
    plain, in_place_too = found
    assert plain.keys() == in_place_too.keys()
    for name, average in plain.items():
        torch.testing.assert_close(in_place_too[name], average, rtol=0, atol=0)
        assert average.abs().sum() > 0, name

"""rank="auto": one sketch a factor and refresh once nothing changes, at the rank the damping in force asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from optim import stated
from rkfac import linalg

CASES = [("factored", True, 0.1), ("product", True, 0.1), ("pi", True, 0.1)]
CASES += [("factored", False, 0.02), ("product", False, 0.02), ("pi", False, 0.02)]


@pytest.mark.parametrize(("rule", "relative", "damping"), CASES)
def test_a_steady_state_costs_one_sketch_and_its_rank_follows_the_damping_in_force(
    rule: Any, relative: bool, damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 140), nn.Tanh(), nn.Linear(140, 130))
    x = torch.randn(400, 150) * torch.logspace(0, -2, 150)
    y = torch.randn(400, 130) * torch.logspace(0, -2, 130)
    calls: list[str] = []
    genuine = linalg.rsvd

    def counted(*args: Any, **keywords: Any) -> Any:
        calls.append(keywords["name"])
        return genuine(*args, **keywords)

    monkeypatch.setattr(rkfac.RSVD, "method", staticmethod(counted))
    monkeypatch.setattr("rkfac.linalg.rank.exact_is_cheaper", lambda *_: False)  # it is, for factors this small
    optimizer = stated.RSKFAC(
        model,
        lr=0.0,
        rank="auto",
        damping=damping,
        damping_rule=rule,
        relative_to="largest" if relative else None,
        factor_every=1,
        inverse_every=1,
        factor_start="unbiased",
        power_iterations=2,
    )
    for i in range(5):
        optimizer.zero_grad()
        (100 * F.mse_loss(model(x), y)).backward()  # eigenvalues of both factors begin at about one
        if i == 4:
            calls.clear()
        optimizer.step()
    assert len(calls) == len(set(calls)) == 4, calls
    for report in optimizer.report():
        spectrum = optimizer.spectrum(report.name)
        in_force = {"input": report.damping_input, "output": report.damping_output}
        if rule == "product":  # l on the product of both: each side is up against l over the other's largest eigenvalue
            in_force = {
                "input": report.damping_input / float(spectrum.output[0]),
                "output": report.damping_input / float(spectrum.input[0]),
            }
        for side, rank in (("input", report.rank_input), ("output", report.rank_output)):
            wanted = linalg.sufficient_rank(getattr(spectrum, side), in_force[side])
            size = getattr(report, f"{side}_dim")
            assert 1 < wanted < size, f"{side}: the case must have something to cut ({wanted} of {size})"
            # A sketch sees a value at the threshold a little too small.
            assert wanted - 1 <= rank <= wanted + max(1, wanted // 20), f"{report.name} {side}: {rank}, needed {wanted}"


@pytest.mark.parametrize("passes", [1, 4])
def test_a_rank_is_a_32nd_of_the_rows_that_a_gradient_sums_at_most(passes: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 240), nn.Tanh(), nn.Linear(240, 30))
    optimizer = rkfac.RSKFAC(model, lr=0.0, damping=1e-3)
    for _ in range(passes):
        x, y = torch.randn(640, 250), torch.randn(640, 30)
        (F.mse_loss(model(x), y) / passes).backward()
    optimizer.step()
    wide, small = optimizer.report()
    assert wide.rank_input == wide.rank_output == max(32, 640 * passes // 32)
    assert small.rank_input > max(32, 640 * passes // 32), "a small layer's rank costs nothing"

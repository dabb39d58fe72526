"""What the benchmarks compute and write; how long things take is never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rkfac
from rkfac_lab.bench import decompose, step
from rkfac_lab.bench.timing import interleaved
from rkfac_lab.cli import app


def test_the_benchmark_factor_has_the_spectrum_of_a_k_factor() -> None:
    X, earlier = decompose.factor_pair(600)
    values = torch.linalg.eigvalsh(X).flip(-1)
    assert torch.equal(X, X.mT) or float((X - X.mT).abs().max()) < 1e-6
    assert float(values[200]) < float(values[0]) / 10**1.5  # 1.5 orders of magnitude within 200 modes
    assert float(values[-1]) >= -1e-6
    kept = 0.95**5 * earlier
    assert (
        float(torch.linalg.eigvalsh(X - kept).min()) > -1e-5
    )  # five statistics later: old part decayed, PSD part added


def test_decompose_reports_what_each_contestant_captured() -> None:
    rows = decompose.run([200], rank=40, oversampling=10, rounds=1)
    by_method = {row.method: row for row in rows}
    assert len(by_method) == 9
    assert by_method["eigh"].captured == pytest.approx(1.0, abs=1e-4)
    assert by_method["Cholesky inverse"].captured is None
    for name in ("rsvd q=4", "srevd q=4", "nystrom q=4", "svd_lowrank niter=4", "scikit-learn n_iter=4"):
        captured = by_method[name].captured
        assert captured is not None
        assert 0.9 < captured <= 1.0001
    assert by_method["nystrom q=4"].captured >= by_method["srevd q=4"].captured - 1e-5  # type: ignore[operator]


def test_contestants_take_turns() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, settle=0.0)
    assert order == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_amortised_seconds_weigh_each_kind_of_step_by_how_often_it_occurs() -> None:
    seconds = {"plain": 1.0, "statistics": 2.0, "refresh": 12.0}
    whole_period = [seconds["refresh" if i % 50 == 0 else "statistics" if i % 10 == 0 else "plain"] for i in range(50)]
    assert step.amortised(seconds, 10, 50) == pytest.approx(sum(whole_period) / 50)


def test_every_kind_of_step_is_the_kind_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[bool, bool]] = []
    real = rkfac.KFAC.step

    def spied(self: rkfac.KFAC, closure: None = None) -> None:
        before = counted(self)
        real(self, closure)
        after = counted(self)
        kinds.append((after[0] > before[0], after[1] > before[1]))

    def counted(optimizer: rkfac.KFAC) -> tuple[int, int]:
        (block,) = optimizer.state_dict()["curvature"]["blocks"].values()
        return block["factors"]["input"]["updates"], block["version"]

    monkeypatch.setattr(rkfac.KFAC, "step", spied)
    problem = step.Problem("tiny", lambda: nn.Linear(5, 10), lambda: (torch.randn(8, 5), torch.zeros(8).long()), 1)
    chosen = {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        "K-FAC": lambda m: rkfac.KFAC(m, lr=0.1, factor_every=10, inverse_every=50, eager_start=False),
    }
    results = step.run(problem, chosen)
    warm_up = [(True, True), (False, False), (True, False), (True, True)]
    assert kinds == [*warm_up, (False, False), (False, False), (True, False), (True, True)]
    sgd, kfac = results
    assert sgd.ratio == pytest.approx(1.0)
    assert (kfac.factor_every, kfac.inverse_every) == (10, 50)
    assert kfac.amortised == pytest.approx(step.amortised(kfac.seconds, 10, 50))
    assert set(kfac.phases) == {"statistics", "refresh", "apply"}


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "bench.json"
    arguments = ["bench", "decompose", "--dimensions", "120", "--rank", "20", "--rounds", "1", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "nystrom warm q=1" in result.output
    content = json.loads(out.read_text())
    assert content["benchmark"] == "decompose"
    assert {m["d"] for m in content["measurements"]} == {120}

"""The three examples of curvature beyond training say what their pages say of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_a_laplace_approximation(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = example("curvature_laplace").main(str(tmp_path / "laplace.png"))
    assert found["correlation"] > 0.95
    assert 0.8 < found["ratio"] < 1.4
    assert found["last layer"] < 1e-9
    assert found["far"] > 3 * found["near"]
    assert (tmp_path / "laplace.png").read_bytes().startswith(b"\x89PNG")


def test_influence_of_training_samples(example: Any) -> None:
    found = example("curvature_influence").main()
    assert found["the dense matrix"] > 0.97
    assert found["K-FAC"] > 0.85
    assert found["no curvature"] < 0.65


def test_the_influence_example_s_dense_matrix_is_the_hessian(example: Any) -> None:
    module = example("curvature_influence")
    model, x, y = torch.nn.Linear(64, 10).double(), torch.rand(20, 64).double(), torch.randint(0, 10, (20,))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    ones = torch.ones(20).double()
    hessian = torch.func.hessian(lambda w: module.loss_of(model, w, x, y, ones))(flat)
    torch.testing.assert_close(module.dense_curvature(model, flat, x), hessian)


def test_merging_two_models(example: Any) -> None:
    module = example("curvature_merging")
    assert module.agrees_with_dense() < 1e-6
    for accuracies in module.main().values():
        assert accuracies["merged"] > 85
        assert accuracies["merged"] > max(accuracies["first"], accuracies["second"], accuracies["average"]) + 1

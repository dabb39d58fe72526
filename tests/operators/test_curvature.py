"""Products for a whole model, and curvature in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from operators.cases import CASES, Case, each_case, loss, trained


def model_with_rest() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 5)).double()


@pytest.fixture
def fitted() -> tuple[nn.Module, rkfac.Curvature]:
    model, x, y = model_with_rest(), torch.randn(12, 4).double(), torch.randint(0, 5, (12,))
    return model, rkfac.fit_curvature(model, [(x, y)], F.cross_entropy, damping=0.1)


def white(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


# --- the whole model


def test_products_go_layer_by_layer(fitted: tuple[nn.Module, rkfac.Curvature]) -> None:
    model, curvature = fitted
    v = white(model)
    solved = curvature.inverse_vector_product(v, uncovered=4.0)
    assert list(solved) == list(v)
    for name in ("0", "2"):
        operator = curvature[name]
        expected = operator.unflatten(operator.solve(operator.flatten([v[key] for key in operator.parameters])))
        for key, tensor in zip(operator.parameters, expected, strict=True):
            assert torch.equal(solved[key], tensor)
    assert torch.equal(solved["1.weight"], v["1.weight"] / 4)
    back = curvature.vector_product(solved, uncovered=4.0)
    roots = curvature.inverse_sqrt_vector_product(
        curvature.inverse_sqrt_vector_product(v, uncovered=4.0), uncovered=4.0
    )
    for key in v:
        torch.testing.assert_close(back[key], v[key])
        torch.testing.assert_close(roots[key], solved[key])


def test_lists_are_aligned_with_the_parameters(fitted: tuple[nn.Module, rkfac.Curvature]) -> None:
    model, curvature = fitted
    v = white(model)
    found = curvature.inverse_vector_product([v[name] if name[0] != "1" else None for name in v])
    assert found[2] is None
    by_name = curvature.inverse_vector_product({name: t for name, t in v.items() if name[0] != "1"})
    for name, tensor in zip(v, found, strict=True):
        assert tensor is None or torch.equal(tensor, by_name[name])
    assert set(curvature.inverse_vector_product({k: v[k] for k in ("2.weight", "2.bias")})) == {"2.weight", "2.bias"}


def test_numbers_are_sums_over_layers(fitted: tuple[nn.Module, rkfac.Curvature]) -> None:
    model, curvature = fitted
    assert curvature.logdet() == pytest.approx(curvature["0"].logdet() + curvature["2"].logdet())
    assert curvature.trace() == pytest.approx(curvature["0"].trace() + curvature["2"].trace())
    diagonal = curvature.diagonal()
    shapes = {name: p.shape for name, p in model.named_parameters() if name[0] != "1"}
    assert {name: t.shape for name, t in diagonal.items()} == shapes
    assert sum(float(t.sum()) for t in diagonal.values()) == pytest.approx(curvature.trace())
    assert "2 layers with 35 parameters, 1 parameters left out" in repr(curvature)


def test_what_nobody_covers_is_refused_by_name(fitted: tuple[nn.Module, rkfac.Curvature]) -> None:
    model, curvature = fitted
    v = white(model)
    with pytest.raises(ValueError, match=r"'1.weight' has no curvature \(no adapter for PReLU\).*uncovered=c"):
        curvature.inverse_vector_product(v)
    with pytest.raises(ValueError, match="uncovered must be positive"):
        curvature.inverse_vector_product(v, uncovered=0.0)
    with pytest.raises(ValueError, match=r"layer '0' acts on 0\.weight and 0\.bias together"):
        curvature.inverse_vector_product({"0.weight": v["0.weight"]})
    with pytest.raises(ValueError, match="no parameter called 'head'"):
        curvature.inverse_vector_product({"head": v["0.weight"]})
    with pytest.raises(ValueError, match="2 tensors were given for 5 parameters"):
        curvature.inverse_vector_product([v["0.weight"], v["0.bias"]])
    with pytest.raises(ValueError, match=r"tensors of shapes"):
        curvature.inverse_vector_product({"0.weight": v["0.weight"].T, "0.bias": v["0.bias"]})
    with pytest.raises(KeyError, match="no layer with a curvature is called '1'; there are '0', '2'"):
        curvature["1"]
    for wrong in ({"damping": -1.0}, {"damping": 1.0, "damping_rule": "none"}, {"damping": 1.0, "relative_to": "x"}):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            curvature.damped(**wrong)  # type: ignore[arg-type]


def test_an_optimizer_has_the_same_products() -> None:
    model, x = model_with_rest(), torch.randn(12, 4).double()
    optimizer = rkfac.RSKFAC(model, lr=0.0)
    loss(model(x)).backward()
    optimizer.step()
    v = white(model)
    by_hand = optimizer.curvature().inverse_vector_product(v, uncovered=2.0)
    for found, expected in zip(
        optimizer.inverse_vector_product(list(v.values()), uncovered=2.0), by_hand.values(), strict=True
    ):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"'1\.weight' has no curvature"):
        optimizer.inverse_vector_product(v)


# --- files


@each_case
@pytest.mark.parametrize("keywords", [{}, {"decomposition": rkfac.Nystrom(), "rank": 2}], ids=["exact", "low rank"])
def test_a_file_gives_the_same_back(case: Case, keywords: dict[str, Any], tmp_path: Path) -> None:
    optimizer = trained(case, **keywords)
    same_after_a_file(optimizer.curvature(), optimizer._model, tmp_path)


@pytest.mark.parametrize("keywords", [{"sides": "input"}, {"damping_rule": "pi", "relative_to": "largest"}], ids=str)
def test_sides_and_rules_are_in_it(keywords: dict[str, Any], tmp_path: Path) -> None:
    optimizer = trained(CASES[0], **keywords)
    same_after_a_file(optimizer.curvature(), optimizer._model, tmp_path)


def test_second_moments_are_in_it(tmp_path: Path) -> None:
    optimizer = trained(CASES[0], rkfac.EKFAC, steps=2, decomposition=rkfac.RSVD(), rank=2)
    same_after_a_file(optimizer.curvature(), optimizer._model, tmp_path)


def same_after_a_file(curvature: rkfac.Curvature, model: nn.Module, folder: Path) -> None:
    curvature.save(folder / "c.safetensors")
    for loaded in (rkfac.load_curvature(folder / "c.safetensors", of) for of in (None, model)):
        assert list(loaded) == list(curvature)
        assert (loaded.shapes, loaded.left_out) == (curvature.shapes, curvature.left_out)
        assert loaded.samples == curvature.samples
        for one, other in ((loaded, curvature), (loaded.damped(3.0), curvature.damped(3.0))):
            for name in curvature:
                v = torch.randn(curvature[name].shape[0]).double()
                assert torch.equal(one[name].solve(v), other[name].solve(v))
                assert one[name].logdet() == other[name].logdet()
                assert one[name].parameters == other[name].parameters


def test_a_fitted_one_remembers_its_samples(fitted: tuple[nn.Module, rkfac.Curvature], tmp_path: Path) -> None:
    fitted[1].save(tmp_path / "c.safetensors")
    assert rkfac.load_curvature(tmp_path / "c.safetensors").samples == 12


def test_files_that_do_not_fit_are_refused(fitted: tuple[nn.Module, rkfac.Curvature], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "c.safetensors"
    fitted[1].save(path)
    other = nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 6))
    with pytest.raises(
        ValueError, match=r"of another model: '2.weight' has the shape \(5, 3\) there and \(6, 3\) here"
    ):
        rkfac.load_curvature(path, other)
    with safetensors.safe_open(path, framework="pt") as file:
        words, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for change, complaint in (
        ({"0:input.s": None}, "damaged: layer '0' lacks 's'"),
        ({"0:input.U": torch.eye(6)}, "basis of shape .* has eigenvalues of shape"),
        ({"0:input.U": torch.eye(6)[:, :5].contiguous()}, "factors of '0' are 3 and 6 wide"),
        ({"2:output.mean": torch.tensor(torch.nan)}, "holds NaN or Inf in '2:output.mean'"),
    ):
        changed = {key: t for key, t in {**tensors, **change}.items() if t is not None}
        safetensors.save_file(changed, tmp_path / "changed.safetensors", metadata=words)
        with pytest.raises(ValueError, match=complaint):
            rkfac.load_curvature(tmp_path / "changed.safetensors")
    safetensors.save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="holds no curvature of this kind"):
        rkfac.load_curvature(tmp_path / "x.safetensors")


def test_without_safetensors_the_error_says_what_to_install(
    fitted: tuple[nn.Module, rkfac.Curvature], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        fitted[1].save(tmp_path / "c.safetensors")
    with pytest.raises(ImportError, match="pip install safetensors"):
        rkfac.load_curvature(tmp_path / "c.safetensors")

"""EKFAC as an optimizer: what it equals in its limits, what it refuses, what it saves, numbers of every size."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from optim import stated
from optim.problems import assert_same_parameters, convnet, images, mlp, reader, rows, sentences, step, train, twin
from optim.promises.test_loading_damage import assert_all_refused, honest, snapshot
from rkfac.curvature.block import EigenBlock

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 2}
SKETCH: dict[str, Any] = {"decomposition": rkfac.RSVD(), "rank": 3, "oversampling": 1}
RUNNING: dict[str, Any] = {"moments": "running"}


# --- limits


@pytest.mark.parametrize("relative_to", ["mean", "largest", None])
def test_the_first_step_is_k_fac_s_under_the_product_rule(relative_to: Any) -> None:
    """Before any moment is measured in the basis, M is the product of eigenvalues."""
    model = convnet()
    other, batch = twin(model), images()
    settings: dict[str, Any] = {"graft": None, "relative_to": relative_to, "tail": "trace"}
    optimizer, plain = stated.EKFAC(model, **settings), stated.KFAC(other, damping_rule="product", **settings)
    step(model, optimizer, batch)
    step(other, plain, batch)
    assert_same_parameters(model, other, rtol=1e-8)


@pytest.mark.parametrize("moments", ["samples", "running"])
@pytest.mark.parametrize("strategy", [rkfac.RSVD(), rkfac.SREVD(), rkfac.Nystrom()])
@pytest.mark.parametrize("case", [(convnet, images), (reader, sentences)], ids=["images", "text"])
def test_a_sketch_of_full_rank_is_the_exact_method(moments: Any, strategy: Any, case: Any) -> None:
    model = case[0]()
    other, batches = twin(model), [case[1](30) for _ in range(6)]
    settings: dict[str, Any] = {"moments": moments, "graft": None, "lr": 0.01, **EVERY}
    train(model, stated.EKFAC(model, **settings), batches)
    train(other, stated.EKFAC(other, decomposition=strategy, rank=100, **settings), batches)
    assert_same_parameters(model, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keywords", [{}, RUNNING, SKETCH, RUNNING | SKETCH], ids=str)
def test_a_damping_far_above_all_moments_leaves_the_gradient(keywords: dict[str, Any]) -> None:
    model = mlp()
    other, batches = twin(model), [rows() for _ in range(4)]
    train(model, stated.EKFAC(model, damping=1e12, lr=0.1, momentum=0.9, **EVERY, **keywords), batches)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), batches)
    assert_same_parameters(model, other, rtol=1e-7, atol=1e-9)


def test_running_moments_to_the_power_of_a_half_are_soap_s_direction() -> None:
    """U_G [(U_G^T m U_A) / sqrt(M + l)] U_A^T with m and M the running first and second moments, in a NumPy loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5)).double()
    optimizer = rkfac.EKFAC(
        model, lr=1e-3, moments="running", moment_decay=0.9, power=-0.5, graft="adamw", betas=(0.8, 0.99),
        relative_to=None, damping=1e-4, inverse_every=1000, eager_start=False, rows=None, weight_decay=0.0,
    )  # fmt: skip
    m, M, weight = np.zeros((5, 5)), np.zeros((5, 5)), 0.0
    for k in range(8):
        x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(5, (30,))
        before = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().clone()
        step(model, optimizer, (x, y))
        J = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], 1).numpy()
        block = optimizer._blocks["0"]
        U_G, U_A = (low.U.numpy() for low in (block.output.low, block.input.low))
        assert U_G.shape == U_A.shape == (5, 5)
        m = 0.8 * m + 0.2 * J
        M = 0.9 * M + 0.1 * 30 * (U_G.T @ J @ U_A) ** 2
        weight = 0.9 * weight + 0.1
        S = U_G @ ((U_G.T @ m @ U_A) / np.sqrt(M / weight + 1e-4)) @ U_A.T
        moved = (before - torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach()).numpy()
        np.testing.assert_allclose(moved / np.linalg.norm(moved), S / np.linalg.norm(S), rtol=0, atol=1e-9, err_msg=k)


def test_adaptive_damping_and_the_kl_clip_work_in_its_own_curvature() -> None:
    model, (x, y) = mlp(), rows(40)
    optimizer = stated.EKFAC(
        model, lr=0.5, graft=None, kl_clip=1e-2, adaptive_damping=rkfac.LevenbergMarquardt(every=2), **EVERY
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.param_groups[0]["damping"] != 0.1


# --- arguments

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"damping_rule": "factored"}, "damping_rule='factored' does not go with EKFAC"),
    ({"damping_rule": "pi"}, "damping_rule='pi' does not go with EKFAC"),
    ({"apply": "backward"}, "apply='backward' does not go with EKFAC"),
    ({"sides": "input"}, "sides='input' does not go with EKFAC"),
    ({"sides": "output"}, "sides='output' does not go with EKFAC"),
    ({"moments": "both"}, "moments"),
    ({"moments": None}, "moments"),
    ({"carry": 1}, "carry"),
    ({"moment_decay": 1.0, **RUNNING}, "moment_decay"),
    ({"moment_decay": "0.9", **RUNNING}, "moment_decay"),
    ({"moment_decay": 0.9}, "moment_decay is that of moments='running'"),
    ({"kl_clip": 0.1, "power": -0.5}, "kl_clip"),
    ({"adaptive_damping": rkfac.LevenbergMarquardt(), "power": -0.5}, "adaptive_damping"),
    ({"damping_rule": "tikhonov"}, "damping_rule"),
    ({"apply": "forward"}, "apply"),
]


@pytest.mark.parametrize(("keywords", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_refused_by_name(keywords: dict[str, Any], words: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=words):
        rkfac.EKFAC(model, **keywords)
    assert not model._forward_hooks, "a refused optimizer left hooks behind"


def test_a_rank_that_exact_bases_do_not_read_is_named() -> None:
    with pytest.warns(UserWarning, match="rank=3 means nothing to EKFAC's exact bases: with decomposition"):
        rkfac.EKFAC(mlp(), rank=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rkfac.EKFAC(mlp(), rank=3, decomposition=rkfac.RSVD())
        rkfac.EKFAC(mlp(), rank="auto")


def test_its_signature_is_k_fac_s_and_three_more() -> None:
    mine, base = inspect.signature(rkfac.EKFAC).parameters, inspect.signature(rkfac.KFAC).parameters
    assert mine.keys() - base.keys() == {"moments", "moment_decay", "carry"}
    assert base.keys() <= mine.keys()
    assert mine["damping_rule"].default == "product"


def test_its_own_arguments_are_no_settings_of_a_group() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="moments is the same for all parameters"):
        rkfac.EKFAC(model, params=[{"params": model.parameters(), "moments": "running"}])


# --- memory


@pytest.mark.parametrize("keywords", [SKETCH, RUNNING | SKETCH], ids=["samples", "running"])
def test_every_damage_to_a_saved_state_is_refused_and_changes_nothing(keywords: dict[str, Any]) -> None:
    model = reader()
    optimizer = stated.EKFAC(model, momentum=0.9, factor_every=2, inverse_every=2, **keywords)
    train(model, optimizer, [sentences() for _ in range(3)])
    saved = snapshot(optimizer)
    train(model, optimizer, [sentences() for _ in range(2)])

    def skipped(path: Any, kind: str) -> bool:
        """A layer without a basis has no moments, so that one without the other is a damage here; norms have none."""
        return honest(path, kind) and ((path[-1], kind) != ("basis", "none") or "norm" in path)

    assert_all_refused(optimizer, saved, ["curvature"], skipped, 300)


@pytest.mark.parametrize("change", [{"moments": "running"}, {"carry": False}])
def test_a_state_of_other_moments_is_refused(change: dict[str, Any]) -> None:
    model = mlp()
    first, second = stated.EKFAC(model), stated.EKFAC(twin(model), **change)
    step(model, first, rows())
    with pytest.raises(ValueError, match="method"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="method"):
        stated.KFAC(twin(model), damping_rule="product").load_state_dict(first.state_dict())


def test_the_moments_are_counted_as_memory() -> None:
    model = mlp()
    optimizer = stated.EKFAC(model, **EVERY)
    assert optimizer.report()[0].bytes["basis"] == 0
    step(model, optimizer, rows(40))
    block = optimizer._blocks["0"]
    assert isinstance(block, EigenBlock)
    bases = sum(f.basis_nbytes for f in block.factors.values())
    assert optimizer.report()[0].bytes["basis"] == bases + block.energies.means.nbytes


# --- numbers


@pytest.mark.parametrize("keywords", [{}, RUNNING, SKETCH, RUNNING | SKETCH], ids=str)
def test_a_layer_without_gradients_is_left_where_it_is_and_harms_nobody(keywords: dict[str, Any]) -> None:
    model = mlp(dtype=torch.float32)
    with torch.no_grad():
        model[4].weight.zero_()  # nothing comes through to the layers before
    frozen = copy.deepcopy(model[0])
    optimizer = rkfac.EKFAC(model, lr=0.0, **EVERY, **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [rows(dtype=torch.float32) for _ in range(5)])
        assert torch.equal(model[0].weight, frozen.weight)
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, [rows(dtype=torch.float32) for _ in range(5)])
    assert not torch.equal(model[0].weight, frozen.weight)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("keywords", [{}, RUNNING, SKETCH], ids=["samples", "running", "truncated"])
def test_weights_of_16_bits_train_as_those_of_32_do(keywords: dict[str, Any]) -> None:
    curves = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, batch = convnet(dtype=dtype), images(16, dtype)
        optimizer = rkfac.EKFAC(model, lr=0.05, **EVERY, **keywords)
        curves.append([step(model, optimizer, batch) for _ in range(30)])
    assert curves[0][-1] < 0.3 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], abs=0.1)

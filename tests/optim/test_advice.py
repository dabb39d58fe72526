"""What advise() says of a training, and what it does not say of one that lacks nothing."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import mlp, parameters, rows, train, twin
from optim.test_failures import failing
from rkfac.curvature.block.settings import YOUNG
from rkfac.optim.advice import CUT, FEW_STEPS, LOW, SETTLED, advice
from rkfac.optim.report import LayerReport, Report

EVERY: dict[str, Any] = {"factor_every": 1, "inverse_every": 1}


def about(optimizer: rkfac.KFAC) -> dict[str, tuple[str, ...]]:
    """Layers by the kind of remark."""
    return {remark.about: remark.layers for remark in optimizer.advise()}


def test_a_training_that_lacks_nothing_is_told_so() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows(32) for _ in range(3)])
    assert optimizer.advise() == []
    assert str(optimizer.advise()) == "Nothing stands out: all is well as far as the numbers tell."


# --- clip


@pytest.mark.parametrize("names", [("update_clip",), ("kl_clip",), ("update_clip", "kl_clip")])
def test_clipped_steps_are_counted(names: tuple[str, ...]) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, graft=None, **EVERY)
    for number in range(9):
        for name in names:
            optimizer.param_groups[0][name] = 1e-9 if number % 3 == 0 else 1e9
        train(model, optimizer, [rows()])
        assert {layer.clip < 1 for layer in optimizer.report()} == {number % 3 == 0}
    assert {(layer.clipped, layer.steps) for layer in optimizer.report()} == {(3, 9)}


@pytest.mark.parametrize("clip", [{"update_clip": 1e-6}, {"kl_clip": 1e-12}])
def test_a_clip_that_always_acts_is_named_with_what_to_do(clip: dict[str, float]) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, graft=None, **EVERY, **clip)
    train(model, optimizer, [rows() for _ in range(FEW_STEPS - 1)])
    assert "clip always active" not in about(optimizer)  # too few to tell
    train(model, optimizer, [rows()])
    assert about(optimizer)["clip always active"] == ("0", "2", "4")
    (remark,) = [r for r in optimizer.advise() if r.about == "clip always active"]
    assert "has shortened 100% of the steps of '0', '2', '4'" in remark.text
    assert all((f"{name}=" in remark.text) == (name in clip) for name in ("update_clip", "kl_clip"))
    assert ("Lower lr=" in remark.text) == ("kl_clip" in clip)


@pytest.mark.parametrize("graft", [None, "sgd"])
@pytest.mark.parametrize(("clip", "proportional"), [({"update_clip": 1e-6}, True), ({"kl_clip": 1e-12}, False)])
def test_what_the_remark_says_of_each_clip_and_the_learning_rate_is_so(
    clip: dict[str, float], proportional: bool, graft: Any
) -> None:
    model, batches = mlp(), [rows() for _ in range(3)]
    lengths = []
    for lr in (0.01, 0.1):
        other = twin(model)
        train(other, stated.KFAC(other, lr=lr, **EVERY, **clip | {"graft": graft}), batches)
        start, end = parameters(model), parameters(other)
        lengths.append(float(torch.cat([(end[name] - start[name]).flatten() for name in start]).norm()))
    assert lengths[1] / lengths[0] == pytest.approx(10.0 if proportional else 1.0, rel=1e-3)


@pytest.mark.parametrize("clip", [{"update_clip": 1e6}, {"kl_clip": 1e6}, {}])
def test_a_clip_that_never_acts_is_not(clip: dict[str, float]) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, lr=0.01, graft=None, **EVERY, **clip)
    train(model, optimizer, [rows() for _ in range(FEW_STEPS)])
    assert "clip always active" not in about(optimizer)
    assert {layer.clipped for layer in optimizer.report()} == {0}


# --- rank and damping


def trained(optimizer_type: Any, model: nn.Sequential, steps: int = 2, n: int = 64, **keywords: Any) -> rkfac.KFAC:
    optimizer = optimizer_type(model, **EVERY, **keywords)
    width = model[0].in_features
    scale = torch.logspace(0, -2, width, dtype=torch.float64)
    batches = [(torch.randn(n, width, dtype=torch.float64) * scale, torch.randint(0, 4, (n,))) for _ in range(steps)]
    train(model, optimizer, batches)
    return optimizer


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 4)).double()


@pytest.mark.parametrize("tail", ["zero", "trace"])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize("rule", ["factored", "pi", "product"])
def test_how_much_too_far_a_step_may_go_is_never_less_than_how_far_it_goes(rule: str, power: float, tail: str) -> None:
    """The dense factors know the eigenvalues that were cut off."""
    optimizer = trained(
        stated.RSKFAC, network(), rank=3, damping=1e-2, relative_to=None, damping_rule=rule, power=power, tail=tail
    )
    for layer in optimizer.report():
        block = optimizer._blocks[layer.name]
        A, G = optimizer.spectrum(layer.name)
        low_A, low_G = block.input.low, block.output.low
        for side, exact, low, other in (("input", A, low_A, low_G), ("output", G, low_G, low_A)):
            cut = getattr(layer, f"cut_{side}")
            if len(exact) == low.rank:
                assert cut is None
                continue
            # Of a product the pairs with the other side's largest mode are damped least.
            unit, l = (
                (other.s[0], layer.damping_input) if rule == "product" else (1.0, getattr(layer, f"damping_{side}"))
            )
            worst, most = (float((unit * s + l) / (unit * low.fill + l)) ** -power for s in (exact[3], low.s[-1]))
            assert worst * (1 - 1e-6) <= cut <= most * (1 + 1e-6)
            assert getattr(layer, f"largest_{side}") == pytest.approx(float(unit * low.s[0] / l))


def test_a_rank_that_cuts_off_much_beside_a_small_damping_is_named() -> None:
    small = trained(stated.RSKFAC, network(), rank=2, damping=1e-4)
    assert about(small)["rank too small for the damping"] == ("0", "2")
    (remark,) = [r for r in small.advise() if r.about == "rank too small for the damping"]
    assert "raise rank= above 2" in remark.text
    worst = max(max(layer.cut_input or 0, layer.cut_output or 0) for layer in small.report())
    assert f"up to {worst:.1f} times too long" in remark.text
    assert worst >= CUT


def test_the_rank_is_that_of_a_layer_s_own_group() -> None:
    model = network()
    groups = [
        {"params": list(model[2].parameters())},
        {"params": list(model[0].parameters()), "rank": 2, "damping": 1e-4},
    ]
    optimizer = trained(stated.RSKFAC, model, params=groups, rank="auto", damping=1.0)
    (remark,) = [r for r in optimizer.advise() if r.about == "rank too small for the damping"]
    assert remark.layers == ("0",)
    assert "raise rank= above 2, or say rank='auto'" in remark.text


@pytest.mark.parametrize(
    "keywords", [{"rank": 20, "damping": 1e-4}, {"rank": 2, "damping": 1.0}], ids=["rank", "damping"]
)
def test_one_that_is_large_enough_is_not(keywords: dict[str, Any]) -> None:
    assert "rank too small for the damping" not in about(trained(stated.RSKFAC, network(), **keywords))


def test_modes_that_are_zero_may_be_cut_off_whatever_the_damping() -> None:
    """An input that is never there leaves a mode without energy just below the smallest kept one."""
    model = network()
    with torch.no_grad():
        optimizer = stated.RSKFAC(model, **EVERY, rank=18, damping=1e-6, relative_to="mean", tail="trace")
    x = torch.randn(64, 20, dtype=torch.float64)
    x[:, 17:] = 0  # 17 inputs and the bias
    train(model, optimizer, [(x, torch.randint(0, 4, (64,)))])
    (layer, _) = optimizer.report()
    assert layer.rank_input == 18 < layer.input_dim
    assert layer.captured_input == pytest.approx(1.0)
    assert layer.cut_input == pytest.approx(1.0, abs=1e-3)


def test_a_damping_above_the_spectrum_makes_the_step_the_gradient_and_is_named() -> None:
    model = network()
    optimizer = trained(stated.KFAC, model, damping=100.0, relative_to="largest", momentum=0.0)
    assert about(optimizer)["damping above the spectrum"] == ("0", "2")
    for layer in optimizer.report():
        A, G = optimizer.spectrum(layer.name)
        assert layer.largest_input == pytest.approx(float(A[0]) / layer.damping_input)
        assert layer.largest_output == pytest.approx(float(G[0]) / layer.damping_output)
        assert max(layer.largest_input, layer.largest_output) <= LOW
    # And it is: the next step's direction is the gradient's.
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(64, 20, dtype=torch.float64)), torch.randint(0, 4, (64,))).backward()
    optimizer.step()
    moved = (before - model[0].weight.detach()).flatten()
    assert F.cosine_similarity(moved, model[0].weight.grad.flatten(), dim=0) > 1 - LOW


def test_one_within_the_spectrum_is_not() -> None:
    assert "damping above the spectrum" not in about(trained(stated.KFAC, network(), damping=0.1))
    kept_whole = trained(rkfac.RSKFAC, network())
    assert "damping above the spectrum" not in about(kept_whole)


def test_a_factor_that_is_kept_whole_is_looked_at_without_its_eigenvalues() -> None:
    optimizer = trained(rkfac.RSKFAC, network())
    (layer, _) = optimizer.report()
    low = optimizer._blocks["0"].input.low
    assert isinstance(low, rkfac.linalg.Intact)
    assert "_decomposed" not in vars(low), "eigenvalues cost more than the training"
    A, _ = optimizer.spectrum("0")
    assert float(A[0]) <= layer.largest_input * layer.damping_input
    assert layer.largest_input * layer.damping_input <= math.sqrt(len(A)) * float(A[0]) * (1 + 1e-6)


# --- layers


def test_layers_left_out_are_named_with_their_share_and_their_reason() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, exclude=("2",), **EVERY)
    train(model, optimizer, [rows(32)])
    assert about(optimizer) == {"layers left out": ("2",)}
    share = 63 / sum(p.numel() for p in model.parameters())
    (remark,) = optimizer.advise()
    assert f"{share:.1%} of the trained parameters are not preconditioned and train by 'sgd'" in str(remark)
    assert f"'2' ({share:.1%}): excluded by pattern" in str(remark)


def test_frozen_layers_are_named_and_are_not_left_out() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows(32)])
    assert about(optimizer) == {"frozen layers": ("0",)}
    assert optimizer.report().covered_share == 1.0


def test_layers_left_out_at_rate_zero_are_not_said_to_learn() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, exclude=("2",), fallback_scale=0.0, **EVERY)
    start = parameters(model)
    train(model, optimizer, [rows(32)])
    assert torch.equal(model[2].weight, start["2.weight"])
    (remark,) = optimizer.advise()
    assert "With fallback_scale=0 '2' does not move" in remark.text
    assert "learn as fast" not in remark.text
    assert "at rest (fallback_scale=0): '2'" in str(optimizer.report())


def outside(optimizer: rkfac.KFAC) -> tuple[str, ...]:
    """Parameters that a remark names as nobody's, and the table as well."""
    named = about(optimizer).get("parameters outside", ())
    assert (f"outside: {', '.join(map(repr, named[:3]))}" in str(optimizer.report())) == bool(named)
    return named


def test_parameters_in_no_group_are_not_said_to_train() -> None:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = stated.KFAC(model, params=list(model[0].parameters()), **EVERY)
    train(model, optimizer, [rows(32)])
    assert optimizer.report().trained == 56
    assert outside(optimizer) == ("2.weight", "2.bias", "4.weight", "4.bias")
    assert about(optimizer).keys() == {"parameters outside"}
    text = f"{optimizer.report()}\n{optimizer.advise()}\n"
    assert "by 'sgd'" not in text
    assert text.count("100.0% of 56 trained parameters in 1 of 3 layers preconditioned") == 1
    assert "'2'" not in repr(optimizer)
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    train(model, optimizer, [rows(32)])
    assert optimizer.advise() == []


def test_weights_alone_are_counted_without_their_biases() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, params=[p for p in model.parameters() if p.ndim > 1], **EVERY)
    start = parameters(model)
    train(model, optimizer, [rows(32)])
    assert outside(optimizer) == ("0.bias", "2.bias", "4.bias")
    assert all(torch.equal(p, start[name]) == name.endswith("bias") for name, p in model.named_parameters())
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert optimizer.report().trained == weights
    assert f"hold {weights} of {weights} parameters" in repr(optimizer)


def test_a_layer_frozen_before_it_was_in_a_group_is_told_to_join_one() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = stated.KFAC(model, params=filter(lambda p: p.requires_grad, model.parameters()), **EVERY)
    train(model, optimizer, [rows(32)])
    (remark,) = optimizer.advise()
    assert remark.about == "frozen layers"
    assert "by itself" not in remark.text
    assert "add_param_group()" in remark.text
    model[0].requires_grad_(True)
    assert outside(optimizer) == ("0.weight", "0.bias")  # thawing alone does not do it
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, [rows(32)])
    assert optimizer.advise() == []


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 7).double()


def replace_weights(model: nn.Sequential) -> None:
    model[2].load_state_dict(nn.Linear(8, 7).double().state_dict(), assign=True)


@pytest.mark.parametrize("exclude", [(), ("2",)], ids=["covered", "excluded"])
@pytest.mark.parametrize("replace_it", [replace_module, replace_weights])
@pytest.mark.filterwarnings("ignore:layer '2' is not preconditioned")
def test_a_layer_that_the_model_does_not_hold_any_more_is_named(replace_it: Any, exclude: tuple[str, ...]) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, exclude=exclude, **EVERY)
    replace_it(model)
    start = parameters(model)
    train(model, optimizer, [rows(32)])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert about(optimizer) == {"replaced layers": ("2",), "parameters outside": ("2.weight", "2.bias")}
    assert optimizer.report().trained == sum(start[name].numel() for name in moved)
    assert [line.split()[-1] for line in str(optimizer.report()).splitlines() if line.startswith("2 ")] == ["replaced"]


class Detour(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_layers_without_statistics_are_named_once_steps_are_taken() -> None:
    model = Detour().double()
    optimizer = stated.KFAC(model, **EVERY)
    assert about(optimizer) == {"no step yet": ()}
    train(model, optimizer, [rows(32)])
    assert about(optimizer) == {"layers without curvature": ("unused",)}
    text = optimizer.advise()[0].text
    assert "no backward pass has reached its weight" in text
    assert "still takes plain steps" not in text  # it takes none
    assert "none where none come" in text


def test_failed_decompositions_are_named_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows(32)])
    with failing(monkeypatch, "2"), pytest.warns(UserWarning, match="previous basis is kept"):
        train(model, optimizer, [rows(32)])
    assert about(optimizer) == {"failed decompositions": ("2",)}
    train(model, optimizer, [rows(32)])
    assert optimizer.advise() == []


def test_refused_updates_are_named_until_one_passes() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    train(model, optimizer, [rows(32)])
    optimizer.zero_grad()
    x, y = rows(32)
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="NaN"):
        optimizer.step()
    assert about(optimizer) == {"refused updates": ("2",)}
    train(model, optimizer, [rows(32)])
    assert optimizer.advise() == []


# --- how much was seen


def test_averages_of_far_fewer_rows_than_they_are_wide_are_named() -> None:
    def run(n: int, steps: int, decay: float) -> dict[str, tuple[str, ...]]:
        model = nn.Sequential(nn.Linear(200, 4)).double()
        return about(trained(stated.KFAC, model, steps=steps, n=n, factor_decay=decay))

    few = "few rows for the width"
    assert run(4, 2, 0.95)[few] == ("0",)  # 8 rows for 201
    assert few not in run(64, 2, 0.95)
    assert few not in run(4, 8, 0.95)  # 32 rows
    assert run(4, 8, 0.5)[few] == ("0",)  # of which the average remembers 8


def test_periods_that_are_longer_than_the_run_are_named() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, factor_every=3, inverse_every=5)
    said = []
    for _ in range(5):
        train(model, optimizer, [rows(32)])
        text = " ".join(map(str, optimizer.advise()))
        said.append([word for word in ("factor_every=3", "inverse_every=5") if word in text])
    both, one = ["factor_every=3", "inverse_every=5"], ["inverse_every=5"]
    assert said == [both, both, one, one, []]


def test_periods_are_those_of_a_layer_s_own_group() -> None:
    model = mlp()
    late = {"params": list(model[2:].parameters()), "inverse_every": 5}
    optimizer = stated.KFAC(model, params=[{"params": list(model[0].parameters())}, late], **EVERY)
    train(model, optimizer, [rows(32) for _ in range(3)])
    (remark,) = optimizer.advise()
    assert remark.about == "periods longer than the run"
    assert "fewer than inverse_every=5:" in remark.text


def test_an_eager_start_makes_up_for_long_periods() -> None:
    model = mlp()
    optimizer = rkfac.KFAC(model, factor_every=100, inverse_every=100)
    train(model, optimizer, [rows(32) for _ in range(YOUNG)])
    assert {layer.updates for layer in optimizer.report()} == {YOUNG}
    assert optimizer.advise() == []
    train(model, optimizer, [rows(32)])
    (remark,) = optimizer.advise()
    assert "fewer than factor_every=100: the curvature in use is that of the first 50 steps" in remark.text


def test_layers_with_intervals_of_their_own_have_no_periods() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, stale=0.1)
    train(model, optimizer, [rows(32) for _ in range(2)])
    assert optimizer.advise() == []


# --- seconds: made by hand, for a clock cannot be made to say what is wanted


def timed(spent: dict[str, float], seconds: float, steps: int) -> Report:
    layers = [
        LayerReport("a", "Linear", True, steps=steps, seconds=spent),
        LayerReport("b", "Linear", True, steps=steps),
    ]
    layers[1] = replace(layers[1], seconds=dict.fromkeys(spent, 0.0))
    settings = {"factor_every": 10, "inverse_every": 50, "rank": 8}
    layers = [replace(layer, settings=settings) for layer in layers]
    return Report(layers, steps, seconds, settings={"rows": 1024})


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [
        ("statistics", "raise factor_every= (10 now), or lower rows= (1024 now)"),
        ("refresh", "raise inverse_every= (50 now)"),
        ("apply", "take larger batches"),
    ],
)
def test_a_phase_that_takes_much_of_the_time_is_named(phase: str, remedy: str) -> None:
    spent = {"statistics": 1.0, "refresh": 1.0, "apply": 1.0} | {phase: 4.0}
    (remark,) = advice(timed(spent, 10.0, SETTLED * 50))
    assert remark.about == f"{phase} dominates"
    assert f"The phase {phase!r} took 40% of the 10.0 s in which {SETTLED * 50} steps were taken" in remark.text
    assert remedy in remark.text
    assert remark.layers[0] == "a"
    assert advice(timed(spent, 40.0, SETTLED * 50)) == []
    assert advice(timed(spent, 10.0, SETTLED * 50 - 1)) == []  # the start counts too much yet


@pytest.mark.parametrize(
    ("kind", "keywords", "ranked"),
    [
        (rkfac.RSKFAC, {}, True),
        (rkfac.KFAC, {}, False),
        (rkfac.RSKFAC, {"decomposition": rkfac.RSVD(rank=3)}, False),
        (rkfac.KFAC, {"decomposition": rkfac.Auto()}, True),
        (rkfac.BKFAC, {}, True),
        (rkfac.SENG, {}, False),
    ],
)
def test_only_who_reads_a_rank_is_told_to_lower_it(kind: Any, keywords: dict[str, Any], ranked: bool) -> None:
    model = mlp()
    optimizer = kind(model, **keywords)
    train(model, optimizer, [rows(32)])
    spent = dict.fromkeys(("statistics", "refresh", "apply"), 1.0)
    layers = [replace(layer, seconds=spent, steps=10**4) for layer in optimizer.report()]
    said = {r.about: r.text for r in advice(Report(layers, 10**4, 3.0, settings={"rows": 1024}))}
    assert ("lower rank=" in said["refresh dominates"]) == ranked
    assert ("lower rank=" in said["apply dominates"]) == ranked
    assert ("raise factor_every=" in said["statistics dominates"]) == (kind is not rkfac.SENG)


def test_steps_of_a_loaded_state_are_not_counted_with_the_seconds_of_this_object() -> None:
    model = mlp()
    optimizer = stated.KFAC(model, update_clip=1e-6, **EVERY)
    train(model, optimizer, [rows() for _ in range(30)])
    other = twin(model)
    resumed = stated.KFAC(other, update_clip=1e-6, **EVERY)
    resumed.load_state_dict(optimizer.state_dict())
    train(other, resumed, [rows() for _ in range(FEW_STEPS)])
    report = resumed.report()
    assert (report.steps, report.taken) == (50, FEW_STEPS)
    assert f"50 steps in all, {FEW_STEPS} by this object in {report.seconds:.2f} s" in str(report)
    (remark,) = [r for r in resumed.advise() if r.about == "clip always active"]
    assert "100% of the steps that this object took of '0', '2', '4'" in remark.text


def test_seconds_begin_with_the_first_statistic_and_end_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    model = mlp()
    optimizer = stated.KFAC(model, **EVERY)
    assert optimizer.report().seconds == 0.0
    now[0] = 200.0  # however long after it was built
    train(model, optimizer, [rows()])
    now[0] = 230.0
    train(model, optimizer, [rows()])
    now[0] = 500.0
    assert optimizer.report().seconds == 30.0

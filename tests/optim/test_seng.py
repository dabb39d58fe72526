"""SENG against dense Fisher matrices, its own limits, and thirty steps of an independent NumPy implementation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from optim import stated
from optim.problems import (
    assert_moved,
    averages,
    convnet,
    images,
    mlp,
    parameters,
    reader,
    rows,
    sentences,
    step,
    train,
    twin,
)
from optim.test_trajectory import batches, network
from oracles import numpy_seng
from rkfac.curvature.randomness import Seeded, subset

EXACT: dict[str, Any] = {"graft": None, "momentum": 0.0, "lr": 1.0, "inverse_every": 1, "columns": None}


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """U of every module with a weight, (N, D): one backward pass a sample, weight and bias of an output side by side."""
    found: dict[str, list[Tensor]] = {}
    for n in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]).backward()
        for name, gradient in joined(model).items():
            found.setdefault(name, []).append(gradient.flatten())
    model.zero_grad()
    return {name: torch.stack(gradients) / math.sqrt(len(x)) for name, gradients in found.items()}


def joined(model: nn.Module, of: str = "grad") -> dict[str, Tensor]:
    """[weight, bias] of every module that has a weight, as one matrix."""
    made = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
            parts = [p.grad if of == "grad" else p.detach() for p in (module.weight, module.bias)]
            made[name] = torch.cat([parts[0].reshape(len(parts[1]), -1), parts[1][:, None]], 1).clone()
    return made


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What one step of learning rate 1 subtracted."""
    start = joined(model, "data")
    step(model, optimizer, batch)
    return {name: start[name] - value for name, value in joined(model, "data").items()}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


CASES = {
    "rows": (mlp, rows),
    "images": (lambda: nn.Sequential(*(m for m in convnet() if not isinstance(m, nn.BatchNorm2d))), images),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), Mean(), nn.Linear(5, 4)).double(),
        lambda n: (torch.randn(n, 3, 6).double(), torch.randint(4, (n,))),
    ),
    "norms": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 4)).double(), rows),
}


@pytest.mark.parametrize("form", [{}, {"explicit_up_to": 0, "positions": None}], ids=["explicit", "implicit"])
@pytest.mark.parametrize("damping", [1e-3, 2.0])
@pytest.mark.parametrize("case", CASES)
def test_without_sampling_it_is_the_dense_solve(case: str, damping: float, form: dict[str, Any]) -> None:
    """(l I + F)^-1 g with F = 1/N sum of outer products of single samples' gradients, at that batch and at the next."""
    make, draw = CASES[case]
    model, (x, y), another = make(), draw(7), draw(5)
    U = by_hand(model, x, y)
    sharing = "reduce" if case == "sequences" else "expand"
    keywords = {**EXACT, **form, "inverse_every": 50, "weight_sharing": sharing}
    optimizer = stated.SENG(model, damping=damping, relative_to=None, **keywords)
    for batch in ((x, y), another):
        step_taken = moved(model, optimizer, batch)
        for name, gradient in joined(model).items():
            fisher = U[name].T @ U[name]
            expected = torch.linalg.solve(fisher + damping * torch.eye(len(fisher)).double(), gradient.flatten())
            torch.testing.assert_close(step_taken[name].flatten(), expected, rtol=1e-8, atol=1e-10 / damping)


@pytest.mark.parametrize("unit", ["largest", "mean"])
def test_a_relative_damping_is_in_units_of_the_fisher_matrix(unit: Any) -> None:
    model, (x, y) = mlp(), rows(7)
    U = by_hand(model, x, y)
    optimizer = stated.SENG(model, damping=0.3, relative_to=unit, **EXACT)
    step_taken = moved(model, optimizer, (x, y))
    for name, gradient in joined(model).items():
        fisher = U[name].T @ U[name]
        values = torch.linalg.eigvalsh(fisher)
        damping = 0.3 * (values.max() if unit == "largest" else values.mean())
        expected = torch.linalg.solve(fisher + damping * torch.eye(len(fisher)).double(), gradient.flatten())
        torch.testing.assert_close(step_taken[name].flatten(), expected, rtol=1e-8, atol=1e-8)
    told = {record.name: record.damping_output for record in optimizer.report()}
    assert told["4"] == pytest.approx(float(damping))


def test_much_damping_is_the_gradient_and_duplicated_samples_change_nothing() -> None:
    model, (x, y) = convnet(), images(5)
    model = nn.Sequential(*(m for m in model if not isinstance(m, nn.BatchNorm2d)))
    doubled = twin(model)
    plain = stated.SENG(model, damping=1e6, relative_to=None, **EXACT)
    for name, change in moved(model, plain, (x, y)).items():
        torch.testing.assert_close(change * 1e6, joined(model)[name], rtol=1e-4, atol=1e-7)
    model = twin(doubled)
    once, twice = (stated.SENG(m, damping=0.1, relative_to="largest", **EXACT) for m in (model, doubled))
    single, double = moved(model, once, (x, y)), moved(doubled, twice, (torch.cat([x, x]), torch.cat([y, y])))
    for name, change in single.items():
        torch.testing.assert_close(double[name], change, rtol=1e-7, atol=1e-9)


def test_sampling_all_columns_is_not_sampling() -> None:
    for form in ({}, {"explicit_up_to": 0}):
        model, batch = mlp(), rows()
        other = twin(model)
        for m, columns in ((model, None), (other, 9)):  # 8 inputs and a bias at most, and 8 x 9 < 81 entries
            step(m, stated.SENG(m, **{**EXACT, **form, "columns": columns}), batch)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", [{}, {"explicit_up_to": 0}], ids=["explicit", "implicit"])
def test_the_published_scaling_is_the_unbiased_one_with_a_smaller_damping_inside(form: dict[str, Any]) -> None:
    """l stays outside: l' S' of the unbiased sketch with l' = l q / D is l S of the published one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(11, 10, bias=False)).double()
    other, x, y = twin(model), torch.randn(6, 11).double(), torch.randint(4, (6,))
    sampled = 16 / 110
    keywords = {**EXACT, **form, "columns": 4, "relative_to": None}
    published = stated.SENG(model, damping=0.7, scaling="published", **keywords)
    unbiased = stated.SENG(other, damping=0.7 * sampled, scaling="unbiased", **keywords)
    start = parameters(model)["0.weight"]
    for m, optimizer in ((model, published), (other, unbiased)):
        step(m, optimizer, (x, y))
    theirs, mine = start - parameters(model)["0.weight"], start - parameters(other)["0.weight"]
    torch.testing.assert_close(theirs, mine * sampled, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(theirs, model[0].weight.grad / 0.7, rtol=1e-2), "the curvature must have counted"


def test_the_published_product_is_exact_for_one_sample() -> None:
    for kind, draw in ((mlp, rows), (lambda: convnet()[3:], lambda n: (torch.randn(n, 4, 6, 6).double(), rows(n)[1]))):
        model, batch = kind(), draw(1)
        other = twin(model)
        for m, product in ((model, "exact"), (other, "published")):
            step(m, stated.SENG(m, explicit_up_to=0, product=product, damping=0.1, **EXACT), batch)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_singular_directions_beyond_those_there_are_change_nothing() -> None:
    """An output gradient of three channels has at most three of them at sixteen positions."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    other, batch = twin(model), (torch.randn(5, 2, 4, 4).double(), torch.randint(4, (5,)))
    for m, positions in ((model, None), (other, 3)):
        step(m, stated.SENG(m, explicit_up_to=0, positions=positions, **EXACT), batch)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_a_layer_called_twice_has_one_gradient_a_sample() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))

    for form in ({}, {"explicit_up_to": 0}):
        model, (x, y) = Twice().double(), rows(7)
        U = by_hand(model, x, y)
        step_taken = moved(model, stated.SENG(model, damping=0.1, relative_to=None, **{**EXACT, **form}), (x, y))
        for name, gradient in joined(model).items():
            fisher = U[name].T @ U[name]
            expected = torch.linalg.solve(fisher + 0.1 * torch.eye(len(fisher)).double(), gradient.flatten())
            torch.testing.assert_close(step_taken[name].flatten(), expected, rtol=1e-8, atol=1e-9)


def test_drawn_samples_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """F of three of nine samples, each standing for three: the mean over all choices is F of all."""
    model, (x, y) = mlp(), rows(9)
    U = by_hand(model, x, y)["2"]
    optimizer = stated.SENG(model, lr=0.0, rows=3, inverse_every=1)
    step(model, optimizer, (x, y))
    kept = optimizer.state_dict()["curvature"]["blocks"]["2"]["basis"]
    assert kept["rows"]["G"].shape[1] == 3
    choices = list(itertools.combinations(range(9), 3))
    total = torch.zeros(U.shape[1], U.shape[1]).double()
    for chosen in choices:
        monkeypatch.setattr(
            optimizer._blocks["2"], "draw", lambda n, device, chosen=chosen: (torch.tensor(chosen), 3.0)
        )
        step(model, optimizer, (x, y))
        total += averages(optimizer)["2"] / len(choices)
    torch.testing.assert_close(total, U.T @ U)


# --- when


def test_one_batch_serves_a_whole_period_and_ragged_ones_are_as_good() -> None:
    model = mlp()
    optimizer = stated.SENG(model, inverse_every=3)
    seen = []
    for n in (12, 5, 5, 7, 5, 5):
        train(model, optimizer, [rows(n)])
        basis = optimizer.state_dict()["curvature"]["blocks"]["0"]["basis"]
        seen.append(basis["rows"]["G"].shape[1])
    assert seen == [12, 12, 12, 7, 7, 7]


@pytest.mark.parametrize("stagger", [False, True])
def test_statistics_are_collected_at_the_steps_that_use_them_alone(stagger: bool) -> None:
    model = mlp()
    optimizer = stated.SENG(model, inverse_every=6, stagger=stagger)
    taken = []
    for _ in range(13):
        train(model, optimizer, [rows()])
        taken.append([block.updates for block in optimizer._blocks.values()])
    counts = [[b - a for a, b in itertools.pairwise(column)] for column in zip(*taken, strict=True)]
    assert taken[0] == [1, 1, 1]
    assert all(sum(column) == 2 for column in counts), counts
    together = sum(all(day) for day in zip(*counts, strict=True))
    assert together == (0 if stagger else 2)


def test_an_early_start_has_curvature_of_the_first_steps() -> None:
    model = mlp()
    optimizer = rkfac.SENG(model, eager_start=True)
    train(model, optimizer, [rows() for _ in range(10)])
    assert optimizer._blocks["0"].updates == 7  # steps 0, 1, 2, 3, 4, 6, 9


# --- what is published


def test_its_own_length_is_that_of_torchs_sgd_around_the_direction() -> None:
    """Decay after the preconditioner and before momentum; the directions are those that a run without either takes."""
    for nesterov in (False, True):
        model = mlp()
        reference, batch_list = twin(model), [rows() for _ in range(5)]
        keywords: dict[str, Any] = {"graft": None, "columns": None, "damping": 0.5, "relative_to": None}
        optimizer = stated.SENG(
            model, lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1, inverse_every=1, **keywords
        )
        sgd = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
        for x, y in batch_list:
            step(model, optimizer, (x, y))
            probe = twin(reference)
            start = parameters(probe)
            step(probe, stated.SENG(probe, lr=1.0, momentum=0.0, inverse_every=1, **keywords), (x, y))
            for (name, p), q in zip(reference.named_parameters(), parameters(probe).values(), strict=True):
                p.grad = start[name] - q
            sgd.step()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_published_norms_have_their_gradient_over_one_plus_the_damping() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()
    optimizer = stated.SENG(model, damping=2.0, relative_to=None, norms="published", **EXACT)
    start = parameters(model)
    step(model, optimizer, rows())
    for name in ("1.weight", "1.bias"):
        gradient = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(start[name] - parameters(model)[name], gradient / 3)
    told = {record.name: record for record in optimizer.report()}
    assert told["1"].covered
    assert told["1"].reason == ""


def test_the_paper_s_settings_build_and_train() -> None:
    model = convnet(dtype=torch.float32)
    optimizer = rkfac.SENG(model, **rkfac.seng_defaults())
    start = parameters(model)
    train(model, optimizer, [images(dtype=torch.float32) for _ in range(3)])
    assert_moved(model, start)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["damping"], group["weight_decay"], group["momentum"]) == (0.05, 2.0, 1e-2, 0.9)
    assert group["inverse_every"] == 200
    assert optimizer._settings.method.columns == 128


# --- arguments


def test_its_signature_leaves_out_what_means_nothing_to_it() -> None:
    import inspect

    known = inspect.signature(rkfac.SENG).parameters
    assert not rkfac.SENG.lacks.keys() & known.keys()
    assert {"columns", "scaling", "product", "positions", "explicit_up_to", "norms", "damping", "graft"} <= known.keys()
    assert known["inverse_every"].default == 200
    assert rkfac.SENG.lacks.keys() <= inspect.signature(rkfac.KFAC).parameters.keys()
    groups = rkfac.SENG(mlp()).param_groups[0].keys()
    assert not rkfac.SENG.lacks.keys() & groups


@pytest.mark.parametrize("name", sorted(rkfac.SENG.lacks))
def test_what_means_nothing_to_it_is_refused_with_both_names_and_the_reason(name: str) -> None:
    import inspect

    model = mlp()
    default = inspect.signature(rkfac.KFAC).parameters[name].default
    with pytest.raises(ValueError, match=rf"SENG has no {name}: "):
        rkfac.SENG(model, **{name: default})
    with pytest.raises(ValueError, match=name):
        rkfac.SENG(model, params=[{"params": list(model.parameters()), name: default}])
    assert not model._forward_hooks


@pytest.mark.parametrize(
    "name, value",
    [("columns", v) for v in (0, -1, 2.5, True, "all")]
    + [("positions", v) for v in (0, 1.5, True, "all")]
    + [("explicit_up_to", v) for v in (-1, 1.5, None, True)]
    + [("scaling", v) for v in ("biased", None)]
    + [("product", v) for v in ("rank", None)]
    + [("norms", v) for v in ("none", None)],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=name):
        rkfac.SENG(model, **{name: value})
    assert not model._forward_hooks


def test_published_norms_ask_for_an_absolute_damping() -> None:
    with pytest.raises(ValueError, match=r"norms='published'.*relative_to=None"):
        rkfac.SENG(mlp(), norms="published")


def test_embeddings_are_left_to_the_fallback_rule_with_a_sentence() -> None:
    model = reader()
    optimizer = stated.SENG(model)
    train(model, optimizer, [sentences()])
    told = {record.name: record for record in optimizer.report()}
    assert not told["embedding"].covered
    assert "SENG has no curvature for embeddings" in told["embedding"].reason
    with pytest.raises(ValueError, match="hidden"):
        optimizer.spectrum("hidden")


def test_adaptive_damping_knows_the_whole_curvature() -> None:
    """(F + l I) times a change, against the dense matrix; sampled or not."""
    for columns in (None, 2):
        model, (x, y) = mlp(), rows(7)
        U = by_hand(model, x, y)["2"]
        optimizer = stated.SENG(model, lr=0.0, damping=0.3, relative_to=None, columns=columns)
        step(model, optimizer, (x, y))
        change = (torch.randn(7, 8).double(), torch.randn(7).double())
        product = optimizer._blocks["2"].multiply(change, optimizer.param_groups[0])
        flat = torch.cat([change[0], change[1][:, None]], 1).flatten()
        expected = U.T @ (U @ flat) + 0.3 * flat
        got = torch.cat([product[0], product[1][:, None]], 1).flatten()
        torch.testing.assert_close(got, expected)
    model = mlp()
    optimizer = stated.SENG(model, lr=0.05, adaptive_damping=rkfac.LevenbergMarquardt(every=1), inverse_every=2)
    for x, y in (rows() for _ in range(3)):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert optimizer.param_groups[0]["damping"] != 0.1


# --- numbers


@pytest.mark.parametrize("form", [{}, {"explicit_up_to": 0}], ids=["explicit", "implicit"])
@pytest.mark.parametrize("where", ["loss", "inputs"])
def test_the_step_is_that_of_float64_at_every_scale(where: str, form: dict[str, Any]) -> None:
    for scale in (1e-18, 1e-9, 1.0, 1e9, 1e12):
        found = {}
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)).to(dtype)
            x, y = torch.randn(9, 2, 4, 4).to(dtype), torch.randint(4, (9,))
            if where == "inputs":
                x = x * scale
                with torch.no_grad():
                    model[0].weight.div_(scale)
            optimizer = stated.SENG(model, lr=0.0, damping=0.1, relative_to="largest", inverse_every=1, **form)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * (scale if where == "loss" else 1.0)).backward()
            optimizer.step()
            found[dtype] = []
            for block in optimizer._blocks.values():
                direction = block.direction(tuple(p.grad for p in block.parameters), optimizer.param_groups[0])
                found[dtype] += [part.tensor.double() / direction.length for part in direction.parts]
                found[dtype].append(torch.tensor(math.log(direction.norm)))
        for mine, theirs in zip(found[torch.float32], found[torch.float64], strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_small_dampings_agree_with_float64(damping: float) -> None:
    """More modes than digits: what rounding cannot tell from zero is not inverted."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)).to(dtype)
        x, y = torch.randn(12, 40).to(dtype), torch.randint(4, (12,))
        x, y = torch.cat([x, x[:4]]), torch.cat([y, y[:4]])  # a singular kernel
        optimizer = stated.SENG(model, lr=0.0, damping=damping, momentum=0.5, graft=None, inverse_every=1)
        step(model, optimizer, (x, y))
        found[dtype] = [optimizer.state[p]["momentum_buffer"].double() for p in model.parameters()]
    for mine, theirs in zip(found[torch.float32], found[torch.float64], strict=True):
        assert float(torch.linalg.norm(mine - theirs) / torch.linalg.norm(theirs)) < 1e-2 * 1e-4 / damping + 1e-4


def test_a_dead_layer_stays_and_the_others_train() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    for unit in ("largest", "mean", None):
        optimizer = rkfac.SENG(model, relative_to=unit, inverse_every=2)
        start = parameters(model)
        train(model, optimizer, [rows(dtype=torch.float32) for _ in range(5)])
        assert all(value.isfinite().all() for value in parameters(model).values())
        assert torch.equal(parameters(model)["0.weight"], start["0.weight"])
        assert not torch.equal(parameters(model)["2.bias"], start["2.bias"])


# --- thirty steps

SKETCHES: dict[str, dict[str, Any]] = {
    "nothing sampled": {"columns": None},
    "entries": {"columns": 4},
    "entries, published scaling": {"columns": 4, "scaling": "published"},
    "products": {"columns": None, "explicit_up_to": 0, "positions": None},
    "products, sampled": {"columns": 4, "explicit_up_to": 0, "positions": None},
    "as published": {
        "columns": 4,
        "explicit_up_to": 60,
        "positions": 3,
        "product": "published",
        "scaling": "published",
    },
}


@pytest.mark.parametrize("damping, unit", [(2.0, None), (0.5, "largest"), (30.0, "mean")])
@pytest.mark.parametrize("sketch", SKETCHES)
def test_thirty_steps_agree_with_numpy(sketch: str, damping: float, unit: Any) -> None:
    settings = {"columns": 256, "scaling": "unbiased", "product": "exact", "positions": 16, "explicit_up_to": 700_000}
    settings |= SKETCHES[sketch]
    model, data = network(), batches()
    layers = {str(i): m for i, m in enumerate(model) if hasattr(m, "weight")}
    start = [(m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in layers.values()]
    numbers: dict[str, Any] = {"lr": 0.02 if unit is None else 0.004, "momentum": 0.9, "weight_decay": 1e-2}
    optimizer = rkfac.SENG(
        model,
        damping=damping,
        relative_to=unit,
        graft=None,
        inverse_every=7,
        eager_start=False,
        seed=3,
        **settings,
        **numbers,
    )
    source, names = Seeded(3), list(layers)

    def draw(layer: int, what: str, of: int, count: int, refresh: int) -> np.ndarray:
        return subset(of, count, source.generator("columns", names[layer], what, refresh)).numpy()

    history, losses = numpy_seng.train(
        start,
        data,
        draw=draw,
        damping=damping,
        relative_to=unit,
        period=7,
        learning_rate=numbers["lr"],
        momentum=numbers["momentum"],
        weight_decay=numbers["weight_decay"],
        **settings,
    )
    assert max(losses[-3:]) < 3, "what diverges shows nothing"
    for (x, y), expected, loss in zip(data, history, losses, strict=True):
        assert step(model, optimizer, (torch.from_numpy(x), torch.from_numpy(y))) == pytest.approx(loss, abs=1e-8)
        for (weight, bias), layer in zip(expected, layers.values(), strict=True):
            np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=0, atol=1e-8)
            np.testing.assert_allclose(layer.bias.detach().numpy(), bias, rtol=0, atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("graft", [None, "sgd", "adamw"])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("scaling", ["unbiased", "published"])
def test_a_thin_product_is_added_as_it_is(
    bias: bool, graft: str | None, columns: int | None, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published product has the rank of a sample: no step is formed, and it is the same step."""
    from rkfac.curvature.block.gradients import LayerGradients

    made: list[bool] = []
    genuine = LayerGradients._thin

    def noted(self: LayerGradients, *args: Any) -> Any:
        found = genuine(self, *args)
        made.append(found is not None)
        return found

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 9, bias=bias), nn.Tanh(), nn.Linear(9, 4, bias=bias)).double()
    other = twin(model)
    keywords = {"product": "published", "explicit_up_to": 0, "columns": columns, "scaling": scaling, "graft": graft}
    batches = [(torch.randn(12, 6, dtype=torch.float64), torch.randint(4, (12,))) for _ in range(5)]

    def run(model: nn.Module) -> None:
        momentum = {} if graft == "adamw" else {"momentum": 0.9}
        optimizer = rkfac.SENG(model, lr=0.01, inverse_every=2, damping=0.5, **keywords, **momentum)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    monkeypatch.setattr(LayerGradients, "_thin", noted)
    run(model)
    assert len(made) == 10
    assert any(made)
    monkeypatch.setattr(LayerGradients, "_thin", lambda *_: None)
    run(other)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)

"""Where nothing is preconditioned, or nothing is left of the preconditioner, the run is torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, ExponentialLR, OneCycleLR

import rkfac
from optim import stated
from optim.graft.by_hand import Watched, cosine, joined
from optim.problems import (
    assert_moved,
    assert_same_parameters,
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

SGDS: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.05},
    {"momentum": 0.7, "nesterov": True, "weight_decay": 0.05, "maximize": True},
]
ADAMS: list[dict[str, Any]] = [
    {"weight_decay": 0.0},
    {"weight_decay": 0.05, "betas": (0.7, 0.9), "eps": 1e-3},
    {"weight_decay": 0.05, "maximize": True},
]
PLAIN = [("sgd", numbers) for numbers in SGDS] + [("adamw", numbers) for numbers in ADAMS]
TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Uncoverable(nn.Module):
    """Nothing a block could cover."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4) / 3)
        self.bias = nn.Parameter(torch.zeros(4))
        self.mixing = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias) @ self.mixing


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all excluded": (mlp, {"exclude": "*"}),
    "nothing to cover": (Uncoverable, {}),
}


def halves(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with rates and decays of their own."""
    all_of_them = list(model.parameters())
    return [
        {"params": all_of_them[::2], "lr": 0.03},
        {"params": all_of_them[1::2], "lr": 0.01, "weight_decay": 0.2},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_of", MODELS)
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("rule", PLAIN, ids=str)
def test_without_a_covered_layer_the_run_is_torchs_bit_for_bit(
    rule: Any, grouped: bool, model_of: str, dtype: torch.dtype
) -> None:
    graft, numbers = rule
    make, keywords = MODELS[model_of]
    model = make().to(dtype)
    other, start = twin(model), parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is preconditioned is said
        optimizer = rkfac.RSKFAC(
            model, lr=0.03, graft=graft, params=halves(model) if grouped else None, **numbers, **keywords
        )
    plain = TORCH[graft](halves(other) if grouped else other.parameters(), lr=0.03, **numbers)
    schedulers = [CosineAnnealingLR(o, 25) for o in (optimizer, plain)]
    for _ in range(20):
        x, y = rows(dtype=dtype)
        assert step(model, optimizer, (x, y)) == step(other, plain, (x, y))
        for scheduler in schedulers:
            scheduler.step()
    assert_moved(model, start)
    assert_same_parameters(model, other, exactly=True)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
    "OneCycleLR without momentum": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
}


@pytest.mark.parametrize("graft, turned", [("sgd", "momentum"), ("adamw", "betas")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_schedulers_turn_momentum_and_betas_as_they_turn_torchs(graft: Any, turned: str, schedule: str) -> None:
    """Bit for bit where nothing is covered, and with the same values, to the end, where layers are."""
    model, covered = mlp(), mlp()
    other = twin(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = rkfac.RSKFAC(model, lr=0.05, graft=graft, exclude="*")
    own = {"momentum": 0.9} if graft == "sgd" else {}  # AdamW's own decay is ours too
    plain = TORCH[graft](other.parameters(), lr=0.05, **own)
    working = stated.RSKFAC(covered, lr=0.05, graft=graft, rank=3, factor_every=1, inverse_every=2)
    schedulers = [SCHEDULES[schedule](o) for o in (optimizer, plain, working)]
    seen = set()
    for _ in range(15):
        batch = rows()
        for m, o in ((model, optimizer), (other, plain), (covered, working)):
            step(m, o, batch)
        for scheduler in schedulers:
            scheduler.step()
        for key in ("lr", turned):
            assert optimizer.param_groups[0][key] == plain.param_groups[0][key] == working.param_groups[0][key]
        seen.add(optimizer.param_groups[0][turned])
    assert (len(seen) > 4) == (schedule in ("OneCycleLR", "CyclicLR"))
    assert_same_parameters(model, other, exactly=True)
    assert all(p.isfinite().all() for p in covered.parameters())


@pytest.mark.parametrize("rule", ["factored", "product", "pi"])
@pytest.mark.parametrize("numbers", SGDS, ids=str)
@pytest.mark.parametrize("make, draw", [(convnet, images), (reader, sentences)], ids=["images", "text"])
def test_infinite_damping_leaves_sgd(make: Any, draw: Any, numbers: dict[str, Any], rule: str) -> None:
    model = make()
    other, batches = twin(model), [draw() for _ in range(10)]
    settings: dict[str, Any] = {"damping": 1e30, "relative_to": None, "damping_rule": rule, "rank": 3}
    optimizer = stated.KFAC(model, lr=0.05, factor_every=1, inverse_every=2, **settings, **numbers)
    plain = torch.optim.SGD(other.parameters(), lr=0.05, **numbers)
    train(model, optimizer, batches)
    train(other, plain, batches)
    assert sum(r.covered for r in optimizer.report()) == 4
    assert_same_parameters(model, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make, draw", [(convnet, images), (reader, sentences)], ids=["images", "text"])
def test_infinite_damping_leaves_adamws_first_moment_at_adamws_length(make: Any, draw: Any) -> None:
    model = make()
    optimizer = stated.KFAC(
        model, lr=0.05, graft="adamw", damping=1e30, relative_to=None, factor_every=1, inverse_every=1, weight_decay=0.1
    )
    watched = Watched(model, optimizer, "adamw", {"weight_decay": 0.1})
    for _ in range(5):
        watched.step(draw(), 0.05)
        means = {name: hand.mean for name, hand in watched.hands.items()}
        for layer, names in watched.layers().items():
            moved = joined(watched.moved, names)
            assert cosine(moved, joined(means, names)) == pytest.approx(1.0, abs=1e-9), layer
            assert float(moved.norm()) == pytest.approx(float(joined(watched.plain, names).norm()), rel=1e-8)


def test_decay_that_begins_later_begins_as_torchs_would() -> None:
    for graft, numbers in (("sgd", {"momentum": 0.9}), ("sgd", {"momentum": 0.9, "nesterov": True}), ("adamw", {})):
        model = mlp()
        other = twin(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = rkfac.RSKFAC(
                model, lr=0.02, graft=graft, weight_decay=0.4, weight_decay_from=3, exclude="*", **numbers
            )
        plain = TORCH[graft](other.parameters(), lr=0.02, weight_decay=0.0, **numbers)
        for k in range(7):
            plain.param_groups[0]["weight_decay"] = 0.4 if k >= 3 else 0.0
            batch = rows()
            assert step(model, optimizer, batch) == step(other, plain, batch)
        assert_same_parameters(model, other, exactly=True)


# --- what is asked for


def test_momentum_beside_adamws_length_is_refused_with_what_to_say_instead() -> None:
    for keywords in ({"momentum": 0.9}, {"momentum": 0.0}, {"nesterov": True}):
        with pytest.raises(ValueError, match=r"under graft='adamw' say betas=\(momentum, 0\.999\)"):
            rkfac.RSKFAC(mlp(), graft="adamw", **keywords)
    both = rkfac.RSKFAC(mlp(), graft="adamw", fallback="sgd", momentum=0.5)  # somebody has it then
    assert both.param_groups[0]["momentum"] == 0.5


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        rkfac.RSKFAC(mlp(), momentum=0.0, nesterov=True)
    model = mlp()
    optimizer = rkfac.RSKFAC(model, momentum=0.9, nesterov=True)
    start = parameters(model)
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        step(model, optimizer, rows())
    assert all(torch.equal(p, start[name]) for name, p in parameters(model).items())


@pytest.mark.parametrize(
    "graft, lr, keys", [("sgd", 0.1, {"momentum"}), (None, 0.1, {"momentum"}), ("adamw", 1e-3, {"betas"})]
)
def test_every_graft_has_its_learning_rate_and_only_its_own_numbers(graft: Any, lr: float, keys: set[str]) -> None:
    """torch's schedulers look at names: a momentum that nobody reads would be turned in the betas' place."""
    optimizer = rkfac.KFAC(mlp(), graft=graft)
    assert optimizer.param_groups[0]["lr"] == lr
    assert optimizer.param_groups[0].keys() & {"momentum", "betas"} == keys
    assert rkfac.KFAC(mlp(), lr=0.7, graft=graft).param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("graft, fallback", [("sgd", "adamw"), ("adamw", "sgd")])
def test_another_rule_for_the_rest_is_torchs_too(graft: Any, fallback: Any) -> None:
    model = reader()
    settings: dict[str, Any] = {"graft": graft, "fallback": fallback, "weight_decay": 0.1, "fallback_scale": 0.5}
    optimizer = stated.RSKFAC(model, lr=0.04, rank=3, factor_every=1, inverse_every=1, **settings)
    shadow = nn.Parameter(model.scale.detach().clone())
    own = {"momentum": 0.9} if fallback == "sgd" else {}
    plain = TORCH[fallback]([shadow], lr=0.02, weight_decay=0.1, **own)
    for _ in range(5):
        optimizer.zero_grad()
        x, y = sentences()
        F.cross_entropy(model(x), y).backward()
        shadow.grad = model.scale.grad.clone()
        optimizer.step()
        plain.step()
        assert torch.equal(model.scale, shadow)

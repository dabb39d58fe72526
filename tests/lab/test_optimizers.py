"""Optimizers by name: the right class with the right arguments, and clear refusals."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
from torch import nn

from rkfac_lab import optimizers
from rkfac_lab.errors import LabError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def step(model, optimizer):
    torch.manual_seed(1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(8, 1, 4, 4)), torch.arange(8) % 3).backward()
    optimizer.step()


def test_torch_class_with_its_arguments():
    optimizer = optimizers.build("sgd", network(), {"lr": 0.25, "momentum": 0.5})
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_any_class_by_module_and_name():
    assert type(optimizers.build("torch.optim:RMSprop", network(), {"alpha": 0.5})) is torch.optim.RMSprop


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap", "shampoo"])
def test_state_survives_saving(name, tmp_path):
    """Two steps in one go equal one step, a checkpoint as the run folder makes it, and another step."""
    straight, halted = network(), network()
    optimizer = optimizers.build(name, straight, {"lr": 0.01})
    step(straight, optimizer)
    step(straight, optimizer)
    first = optimizers.build(name, halted, {"lr": 0.01})
    step(halted, first)
    torch.save({"m": halted.state_dict(), "o": first.state_dict()}, tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    resumed = network()
    resumed.load_state_dict(state["m"])
    second = optimizers.build(name, resumed, {"lr": 0.01})
    second.load_state_dict(state["o"])
    step(resumed, second)
    assert not torch.equal(straight[5].weight, halted[5].weight)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_muon_orthogonalises_matrices_and_convolutions_and_nothing_else():
    model, before = network(), network()
    optimizer = optimizers.build("muon", model, {"lr": 0.01})
    step(model, optimizer)
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        update = (q - p).detach().flatten(1) if p.dim() > 1 else (q - p).detach()
        if p.dim() > 1:
            # lr * 0.2 * sqrt(max side) * (singular values near 1), from five Newton-Schulz steps
            values = torch.linalg.svdvals(update) / (0.01 * 0.2 * max(update.shape) ** 0.5)
            if name == "5.weight":  # the gradients of the logits add up to zero: one direction less
                values = values[:-1]
            assert values.min() > 0.4, name
            assert values.max() < 1.3, name
        elif not name.startswith("0"):  # a bias before BatchNorm has no gradient
            assert update.abs().max().item() == pytest.approx(0.01, rel=1e-2), name  # Adam's first step is lr * sign


def test_unknown_name():
    with pytest.raises(LabError, match="did you mean 'rs-kfac'"):
        optimizers.build("rskfac", network(), {})


def test_unknown_module_and_class():
    with pytest.raises(LabError, match="needs the module nowhere"):
        optimizers.build("nowhere:Thing", network(), {})
    with pytest.raises(LabError, match="did you mean 'RMSprop'"):
        optimizers.build("torch.optim:RMSProp", network(), {})


@pytest.mark.parametrize("name", ["sgd", "soap", "muon"])
def test_unknown_argument_names_the_nearest(name):
    with pytest.raises(LabError, match=f"argument of {name} 'weight_decy'; did you mean 'weight_decay'"):
        optimizers.build(name, network(), {"weight_decy": 0.1})


def test_impossible_value_is_said_in_one_sentence():
    for name, argument, value in (
        ("sgd", "lr", "abc"),
        ("adamw", "lr", "abc"),
        ("muon", "lr", "abc"),
        ("soap", "weight_decay", [1]),
        ("torch.optim:SGD", "momentum", "much"),
    ):
        with pytest.raises(LabError, match=re.escape(f"{argument} of {name} must be a number, not {value!r}.")):
            optimizers.build(name, network(), {argument: value})
    with pytest.raises(LabError, match=r"sgd does not accept lr=-1: Invalid learning rate: -1\."):
        optimizers.build("sgd", network(), {"lr": -1})
    with pytest.raises(LabError, match="lr of sgd must be a number, not 'fast'"):
        optimizers.build("sgd", network(), {"lr": "fast"})


CALLS = []


def callable_from_a_configuration(*arguments, **keywords):
    CALLS.append(arguments)
    return torch.optim.SGD(arguments[0], lr=0.1)


class NoOptimizer:
    def __init__(self, *arguments, **keywords):
        CALLS.append(arguments)


@pytest.mark.parametrize(
    "name", ["builtins:list", f"{__name__}:NoOptimizer", f"{__name__}:callable_from_a_configuration"]
)
def test_what_is_no_optimizer_class_is_refused_before_it_is_called(name):
    with pytest.raises(LabError, match=r"not a subclass of torch\.optim\.Optimizer"):
        optimizers.build(name, network(), {})
    assert CALLS == []


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(0)", "def broken("])
def test_a_module_that_cannot_be_imported_is_said(tmp_path, monkeypatch, body):
    (tmp_path / "broken_module.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LabError, match="broken_module"):
        optimizers.build("broken_module:Thing", network(), {})


def test_rkfac_gets_the_model_and_the_seed(monkeypatch):
    """A preset that passes its keywords on, as rkfac's do: names are checked against the base's."""
    stand_in = types.ModuleType("rkfac")

    class KFAC(torch.optim.SGD):
        def __init__(self, model, lr=0.1, damping=0.1, seed=None):
            super().__init__(model.parameters(), lr=lr)
            self.model, self.damping, self.seed = model, damping, seed

    class RSKFAC(KFAC):
        def __init__(self, model, **keywords):
            super().__init__(model, **keywords)

    for kind in (KFAC, RSKFAC):
        kind.__module__ = "rkfac.optim.kfac"
    stand_in.KFAC, stand_in.RSKFAC = KFAC, RSKFAC
    monkeypatch.setitem(sys.modules, "rkfac", stand_in)
    model = network()
    optimizer = optimizers.build("rs-kfac", model, {"damping": 0.5}, seed=3)
    assert optimizer.model is model
    assert (optimizer.damping, optimizer.seed) == (0.5, 3)
    assert optimizers.build("rs-kfac", model, {"seed": 5}, seed=3).seed == 5
    with pytest.raises(LabError, match="'dampin'; did you mean 'damping'"):
        optimizers.build("rs-kfac", model, {"dampin": 0.5})


def test_what_a_member_of_the_family_lacks_is_refused_with_its_own_reason():
    with pytest.raises(LabError, match="SENG has no stale: its curvature is that of one batch"):
        optimizers.build("seng", nn.Linear(3, 3), {"stale": 0.1})

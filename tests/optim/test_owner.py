"""Parameters that find their model, classes that are bound to one, and optimizers inside of wrappers."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from optim.problems import mlp, parameters, rows, same, step, twin

EVERY: dict[str, Any] = {"lr": 0.1, "factor_every": 1, "inverse_every": 2}
Way = Callable[[nn.Module], Any]

WAYS: dict[str, Way] = {
    "parameters": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "a list": lambda model: list(model.parameters()),
    "a list of names": lambda model: list(model.named_parameters()),
    "a filter": lambda model: filter(lambda p: p.requires_grad, model.parameters()),
    "groups": lambda model: [{"params": model[0].parameters()}, {"params": list(model[2:].parameters())}],
    "named groups": lambda model: [
        {"params": [(n, p) for n, p in model.named_parameters() if n.endswith(end)]} for end in ("weight", "bias")
    ],
    "groups of one": lambda model: [{"params": p} for p in model.parameters()],
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def trained(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    for _ in range(3):
        step(model, optimizer, rows())
    return parameters(model)


@each_way
def test_any_way_of_handing_parameters_over_trains_their_model(way: Way) -> None:
    model = mlp()
    found, bound, plain = twin(model), twin(model), twin(model)
    expected = trained(plain, rkfac.RSKFAC(plain, params=way(plain), **EVERY))
    by_parameters = rkfac.RSKFAC(way(found), **EVERY)
    by_class = rkfac.for_model(bound)(way(bound), **EVERY)
    assert same(trained(found, by_parameters), expected)
    assert same(trained(bound, by_class), expected)
    assert [layer.name for layer in by_parameters.report() if layer.covered] == ["0", "2", "4"]
    dictionaries = sum(isinstance(one, dict) for one in way(model))
    assert len(by_class.param_groups) == len(by_parameters.param_groups) == max(1, dictionaries)


def test_a_list_finds_the_outermost_module() -> None:
    """Not the smallest one: what a model returns is what its outermost module returns."""
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(4, 4)})
    optimizer = rkfac.RSKFAC(list(model["body"].parameters()), **EVERY)
    names = {layer.name: layer.reason for layer in optimizer.report()}
    assert {name for name in names if name.startswith("body.")} == {"body.0", "body.2", "body.4"}
    assert names["head"] == "its weight is not among the optimizer's parameters"


def test_an_iterator_finds_what_a_list_finds() -> None:
    """The module it was asked of may be a part, whose output is not the model's."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = rows()
    x = x.float()
    found = []
    for way in (lambda m: m[0].parameters(), lambda m: list(m[0].parameters())):
        own = copy.deepcopy(model)
        optimizer = rkfac.KFAC(way(own), fisher="mc", **EVERY)
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
        found.append((parameters(own), [layer.name for layer in optimizer.report()]))
        optimizer.close()
    assert found[0][1] == found[1][1] == ["0", "2"]
    assert same(found[0][0], found[1][0])


def test_an_iterator_is_that_of_the_module_it_was_asked_of_where_others_only_wrap_it() -> None:
    model = mlp()
    wrappers = nn.Sequential(model), nn.ModuleList([model])
    assert rkfac.RSKFAC(model.parameters()).report()[0].name == "0"
    assert wrappers[0][0] is wrappers[1][0] is model
    with pytest.raises(ValueError, match=r"2 models \(ModuleList, Sequential\)"):
        rkfac.RSKFAC(model[0].parameters())


KINDS = (rkfac.KFAC, rkfac.RSKFAC, rkfac.SREKFAC, rkfac.EKFAC, rkfac.BKFAC, rkfac.SKFAC, rkfac.KLDWRM, rkfac.SENG)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_by_keyword_find_their_model(kind: type[rkfac.KFAC]) -> None:
    model = mlp()
    assert [layer.name for layer in kind(params=model.parameters(), lr=0.1).report()] == ["0", "2", "4"]
    assert [layer.name for layer in rkfac.for_model(model, kind)(params=model.parameters()).report()] == ["0", "2", "4"]
    with pytest.raises(TypeError, match=rf"{kind.__name__} needs a model, or parameters of one"):
        kind(lr=0.1)
    with pytest.raises(TypeError, match=rf"{kind.__name__}.*'params'"):
        rkfac.for_model(model, kind)(lr=0.1)


def test_a_wrapper_is_found_around_its_model() -> None:
    compiled: Any = torch.compile(mlp(), backend="eager")
    optimizer = rkfac.RSKFAC(list(compiled.parameters()), **EVERY)
    # Hooks break no graph: a statistics step runs without it, as it does where the compiled model is given.
    assert type(compiled.forward).__name__ == "_Guarded"
    optimizer.close()
    assert type(compiled.forward).__name__ != "_Guarded"


def test_parameters_of_nobody_and_of_several_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no module has all of these 1 parameters: .*for_model"):
        rkfac.RSKFAC([nn.Parameter(torch.zeros(2))])
    body = mlp()
    first, second = nn.Sequential(body), nn.ModuleList([body])
    with pytest.raises(ValueError, match=r"2 models \(ModuleList, Sequential\): .*for_model"):
        rkfac.RSKFAC(list(body.parameters()))
    del second
    assert rkfac.RSKFAC(list(body.parameters())).report()[0].name == "0.0"
    assert first[0] is body


def test_a_wrapper_that_is_gone_is_no_second_model() -> None:
    """Also where nothing has collected it yet."""
    model = mlp()
    gc.disable()
    try:
        forgotten = nn.Sequential(model)
        forgotten.itself = [forgotten]  # a cycle
        del forgotten
        other = nn.ModuleDict({"kept": model})
        assert rkfac.RSKFAC(list(other.parameters())).report()[0].name == "kept.0"
    finally:
        gc.enable()


# --- for_model


def test_a_bound_class_is_built_and_named_as_its_kind_is() -> None:
    model = mlp()
    kind = rkfac.for_model(model, rkfac.EKFAC)
    assert issubclass(kind, rkfac.EKFAC)
    assert kind.__name__ == "EKFAC"
    shown = inspect.signature(kind).parameters
    known = inspect.signature(rkfac.EKFAC).parameters
    assert list(shown)[:2] == ["params", "lr"]
    assert shown.keys() - {"params"} == known.keys() - {"model", "params"}
    optimizer = kind(model, lr=0.3, moments="running")
    assert optimizer.param_groups[0]["lr"] == 0.3
    with pytest.raises(ValueError, match="moments"):
        kind(model.parameters(), moments="none")
    with pytest.raises(ValueError, match="seed is the same for all parameters"):
        kind([{"params": model.parameters(), "seed": 3}])


def test_states_go_from_a_bound_class_to_its_kind_and_back() -> None:
    model = mlp()
    other = twin(model)
    first = rkfac.for_model(model)(model.parameters(), **EVERY)
    trained(model, first)
    other.load_state_dict(model.state_dict())
    second = rkfac.RSKFAC(other, **EVERY)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert same(trained(other, second), trained(model, first))
    first.load_state_dict(second.state_dict())


def test_parameters_of_another_model_are_refused() -> None:
    model, other = mlp(), mlp()
    kind = rkfac.for_model(model)
    with pytest.raises(ValueError, match="6 of 6 parameters are not those of the Sequential"):
        kind(other.parameters())
    with pytest.raises(ValueError, match="1 of 7 parameters"):
        kind([*model.parameters(), nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="got int"):
        kind(3)
    with pytest.raises(ValueError, match="model must be an nn"):
        rkfac.for_model(model.parameters())
    with pytest.raises(ValueError, match="kind must be an optimizer class"):
        rkfac.for_model(model, torch.optim.SGD)


def test_the_classes_themselves_can_be_sent_elsewhere_and_bound_ones_cannot() -> None:
    assert pickle.loads(pickle.dumps(rkfac.RSKFAC)) is rkfac.RSKFAC
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(rkfac.for_model(mlp()))


# --- unwrap


class Wrapper:
    """As Accelerate's: what it does not know it hides."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_the_optimizer_inside_of_wrappers_is_found() -> None:
    optimizer = rkfac.RSKFAC(mlp())
    assert rkfac.unwrap(optimizer) is optimizer
    assert rkfac.unwrap(Wrapper(Wrapper(optimizer))) is optimizer
    turning = Wrapper(None)
    turning.optimizer = turning
    for stranger in (torch.optim.SGD(mlp().parameters()), Wrapper(None), turning):
        with pytest.raises(ValueError, match="no optimizer of rkfac"):
            rkfac.unwrap(stranger)

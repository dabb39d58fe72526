"""Layers of one's own: registered, covered, and trained exactly as the Linear layer that is inside of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkfac
from layers import own
from layers.own import OWN
from rkfac.layers import Adapter, KroneckerAdapter, ProductAdapter, Uncovered, adapter_for, registry
from rkfac.layers.base import Container
from rkfac.layers.linear import LinearAdapter


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def register_all() -> None:
    for build, adapter, _ in OWN.values():
        rkfac.register(type(build()))(adapter)


class Net(nn.Module):
    """A layer, tanh, the mean over positions, a head: 4 classes. `around` calls the layer."""

    def __init__(self, layer: nn.Module, around: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.layer, self.around, self.head = layer, around, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.around(self.layer, x).tanh()
        return self.head(h.flatten(1, -2).mean(1) if h.ndim > 2 else h)


def _gated(layer: nn.Module, gate: nn.Parameter, x: Tensor) -> Tensor:
    return layer(x) * F.linear(x, gate).sigmoid()


def pair(name: str) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
    """The same function twice: with a layer of one's own, and with nn.Linear and everything else done outside of it."""
    build, _, shape = OWN[name]
    torch.manual_seed(0)
    mine = build()

    def called(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        return y.movedim(1, -1) if isinstance(layer, own.Channels) else y

    with torch.no_grad():
        width = called(mine, torch.zeros(shape)).shape[-1]
    weight, bias = adapter_of(mine).weight(mine), adapter_of(mine).bias(mine)
    matrix = adapter_of(mine).matrix(mine, weight)
    plain = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
    plain.weight.data.copy_(matrix)
    if bias is not None:
        plain.bias.data.copy_(bias)
    gate = nn.Parameter(mine.gate.detach().clone()) if isinstance(mine, own.Gated) else None
    outside: dict[type, Callable[[nn.Module, Tensor], Tensor]] = {
        own.ScaledLinear: lambda layer, x: layer(0.5 * x),
        own.Gated: lambda layer, x: _gated(layer, gate, x),
        own.GLU: lambda layer, x: F.glu(layer(x)),
        own.Quadratic: lambda layer, x: layer((x[..., :, None] * x[..., None, :]).flatten(-2)),
        own.Channels: lambda layer, x: layer(x.movedim(1, -1)),
        own.Twice: lambda layer, x: layer(torch.stack(x.chunk(2, -1), -2)).sum(-2),
    }
    one, other = Net(mine, called, width), Net(plain, outside[type(mine)], width)
    other.gate = gate
    other.head.load_state_dict(one.head.state_dict())
    return one.double(), other.double(), shape


def adapter_of(module: nn.Module) -> KroneckerAdapter:
    found = adapter_for(module)
    assert isinstance(found, KroneckerAdapter), found
    return found


def trained(model: nn.Module, optimizer: rkfac.KFAC, shape: tuple[int, ...], steps: int = 4, parts: int = 1) -> None:
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            x = torch.randn(12, *shape[1:], generator=draw, dtype=torch.float64)
            y = torch.randint(4, (12,), generator=draw)
            (F.cross_entropy(model(x), y) / parts).backward()
        optimizer.step()


OFTEN: dict[str, Any] = {"lr": 0.1, "factor_every": 1, "inverse_every": 2}
WAYS: dict[str, tuple[Callable[..., rkfac.KFAC], dict[str, Any], int]] = {
    "k-fac": (rkfac.KFAC, {}, 1),
    "rs-kfac": (rkfac.RSKFAC, {"rank": 3, "oversampling": 1}, 1),
    "drawn rows": (rkfac.KFAC, {"rows": 5}, 1),
    "reduce": (rkfac.KFAC, {"weight_sharing": "reduce"}, 1),
    "reduce, drawn": (rkfac.KFAC, {"weight_sharing": "reduce", "rows": 5}, 1),
    "accumulated": (rkfac.KFAC, {}, 2),
    "tokens": (rkfac.KFAC, {"loss_average": "tokens"}, 1),
    "mc": (rkfac.KFAC, {"fisher": "mc"}, 1),
    "backward": (rkfac.KFAC, {"apply": "backward"}, 1),
    "adamw": (rkfac.KFAC, {"graft": "adamw", "lr": 0.01}, 1),
    "ek-fac": (rkfac.EKFAC, {}, 1),
    "b-kfac": (rkfac.BKFAC, {"rank": 3, "oversampling": 1}, 1),
    "skfac": (rkfac.SKFAC, {}, 1),
    "kld-wrm": (rkfac.KLDWRM, {"lr": 0.03}, 1),
    "seng": (rkfac.SENG, {}, 1),
}
PAIRS = ["scaled", "scaled, no bias", "gated and transposed", "glu", "quadratic", "channels", "twice"]


# Everything that rows are good for with the two layers that are least like nn.Linear, the others with the essentials.
TRIED = [(name, way) for name in PAIRS for way in WAYS if name in ("glu", "channels") or way in ("k-fac", "drawn rows")]


@pytest.mark.parametrize("name, way", TRIED)
def test_it_trains_as_the_linear_layer_inside_of_it(name: str, way: str) -> None:
    register_all()
    kind, keywords, parts = WAYS[way]
    mine, plain, shape = pair(name)
    settings = {**OFTEN, **keywords}
    if kind is rkfac.SENG:
        settings.pop("factor_every")
    optimizers = [kind(model, **settings) for model in (mine, plain)]
    for model, optimizer in zip((mine, plain), optimizers, strict=True):
        trained(model, optimizer, shape, parts=parts)
    records = {record.name: record for record in optimizers[0].report()}
    assert records["layer"].covered, records["layer"].reason
    assert records["layer"].kind == type(mine.layer).__name__
    adapter = adapter_of(mine.layer)
    start = pair(name)[0]
    assert not torch.allclose(adapter.weight(mine.layer), adapter.weight(start.layer), atol=1e-3)
    found = adapter.matrix(mine.layer, adapter.weight(mine.layer))
    torch.testing.assert_close(found, plain.layer.weight, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(mine.head.weight, plain.head.weight, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["gated and transposed", "layer scale"])
def test_it_resumes_bit_for_bit(name: str) -> None:
    register_all()
    build, _, shape = OWN[name]
    torch.manual_seed(0)
    straight = Net(build(), lambda layer, x: layer(x), shape[-1] if name == "layer scale" else 3).double()
    first = rkfac.RSKFAC(straight, **OFTEN)
    trained(straight, first, shape, steps=3)
    halted, state = copy.deepcopy(straight), copy.deepcopy(first.state_dict())
    trained(straight, first, shape, steps=3)
    second = rkfac.RSKFAC(halted, **OFTEN)
    second.load_state_dict(state)
    trained(halted, second, shape, steps=3)
    for p, q in zip(straight.parameters(), halted.parameters(), strict=True):
        assert torch.equal(p, q)


def test_it_learns_under_autocast() -> None:
    register_all()
    for name in ("glu", "gated and transposed", "quadratic"):
        mine, _, shape = pair(name)
        model = mine.float()
        optimizer = rkfac.KFAC(model, **OFTEN)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(torch.randn(12, *shape[1:])).float(), torch.randint(4, (12,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert all(record.updates > 0 for record in optimizer.report() if record.name == "layer"), name


def test_parameters_that_its_adapter_does_not_know_of_train_by_the_fallback_rule_and_are_named() -> None:
    register_all()
    mine, _, shape = pair("gated and transposed")
    optimizer = rkfac.KFAC(mine, **OFTEN)
    records = {record.name: record for record in optimizer.report()}
    assert records["layer"].covered
    assert not records["layer.gate"].covered
    assert records["layer.gate"].reason == "gate of Gated takes no part in what its adapter knows of, w"
    assert sum(record.parameters for record in records.values()) == sum(p.numel() for p in mine.parameters())
    before = mine.layer.gate.detach().clone()
    trained(mine, optimizer, shape, steps=1)
    assert not torch.equal(mine.layer.gate, before)


def test_a_weight_that_it_shares_is_left_out_by_name() -> None:
    register_all()
    model = nn.Sequential(own.ScaledLinear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    reasons = {record.name: record.reason for record in rkfac.KFAC(model).report()}
    assert (
        "only nn.Linear and nn.Embedding layers may share one, these are '0' (ScaledLinear), '2' (Linear)"
        in reasons["0"]
    )


@pytest.mark.parametrize("kind", [rkfac.KFAC, rkfac.EKFAC, rkfac.BKFAC, rkfac.SKFAC, rkfac.KLDWRM, rkfac.SENG])
def test_scales_of_ones_own_are_covered_by_every_member(kind: type[rkfac.KFAC]) -> None:
    register_all()
    model = nn.Sequential(own.PictureScale(3), nn.Flatten(), own.LayerScale(12), nn.Linear(12, 4)).double()
    optimizer = kind(model, lr=0.03)
    trained(model, optimizer, (1, 3, 2, 2), steps=3)
    assert [record.covered for record in optimizer.report()] == [True, True, True]
    assert all(p.isfinite().all() for p in model.parameters())


# --- the registry


def test_the_nearest_registered_class_serves_whatever_the_order() -> None:
    assert isinstance(adapter_for(own.ScaledLinear(3, 2)), Uncovered)
    rkfac.register(own.ScaledLinear)(own.ScaledAdapter)
    assert isinstance(adapter_for(own.ScaledLinear(3, 2)), own.ScaledAdapter)
    assert type(adapter_for(nn.Linear(3, 2))) is LinearAdapter

    class Kept(own.ScaledLinear):
        scale = 2.0

    class Other(own.ScaledLinear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    assert isinstance(adapter_for(Kept(3, 2)), own.ScaledAdapter)
    assert adapter_for(Other(3, 2)) == Uncovered("Other overrides forward of ScaledLinear")


def test_the_later_of_two_adapters_counts() -> None:
    class Better(own.ScaledAdapter):
        pass

    rkfac.register(own.ScaledLinear)(own.ScaledAdapter)
    rkfac.register(own.ScaledLinear, own.Twice)(Better)
    assert type(adapter_for(own.ScaledLinear(3, 2))) is Better
    assert type(adapter_for(own.Twice(3, 2))) is Better


def test_a_class_that_is_recognised_by_its_forward_may_be_registered_all_the_same() -> None:
    from layers.lookalikes import OwnRMSNorm

    class Mine(rkfac.layers.ScaleAdapter):
        bias_name = None

    rkfac.register(OwnRMSNorm)(Mine)
    assert type(adapter_for(OwnRMSNorm(3))) is Mine


class Bare(KroneckerAdapter):
    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        return 1


class Needy(ProductAdapter):
    def __init__(self, scale: float) -> None:
        self.scale = scale


class NeitherKind(Adapter):
    pass


@pytest.mark.parametrize(
    "modules, adapter, said",
    [
        ((), ProductAdapter, "register needs the module classes"),
        ((nn.Linear(2, 2),), ProductAdapter, "register takes classes, and this is a Linear: register Linear"),
        ((nn.Module,), ProductAdapter, "register takes subclasses of nn.Module, not Module"),
        (("Linear",), ProductAdapter, "register takes subclasses of nn.Module, not 'Linear'"),
        ((ProductAdapter,), ProductAdapter, "register takes subclasses of nn.Module, not ProductAdapter"),
        ((own.GLU,), own.GLU, "GLU is no adapter: derive a class from"),
        ((own.GLU,), ProductAdapter(), "is no adapter: derive a class from"),
        ((own.GLU,), NeitherKind, "NeitherKind is no adapter"),
        ((own.GLU,), Bare, "Bare lacks input_rows, input_shape, matrix, output_rows, output_shape"),
        ((own.GLU,), Needy, "Needy must be made without arguments"),
        ((own.GLU,), Container, "Container lacks inner, samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_registered_is_refused_in_one_sentence(modules: Any, adapter: Any, said: str) -> None:
    before = dict(registry._REGISTRY)
    with pytest.raises(TypeError, match=said):
        # The tests' own checks of types would come first.
        inspect.unwrap(inspect.unwrap(rkfac.register)(*modules))(adapter)
    assert before == registry._REGISTRY


def test_a_weight_of_another_name_that_is_not_there_is_a_reason() -> None:
    rkfac.register(own.GLU)(own.GatedAdapter)
    found = adapter_for(own.GLU(3, 4))
    assert isinstance(found, Uncovered)
    assert "not a plain parameter" in found.reason

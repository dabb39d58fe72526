"""One layer's sketches say nothing about another's: every other layer stays the same bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim import stated
from optim.problems import rows, same, train

SETTINGS: dict[str, Any] = {"lr": 0.0, "oversampling": 1, "factor_every": 1, "inverse_every": 1, "warm_start": False}


class Branches(nn.Module):
    """Layers side by side, so that none sees what another one learns; registered in either order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        made = {name: nn.Linear(6, 4) for name in "abc"}
        for number, name in enumerate("abc"):
            source = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for p in made[name].parameters():
                    p.copy_(torch.randn(p.shape, generator=source))
        for name in order:
            self.add_module(name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("a")(x) + self.get_submodule("b")(x) + self.get_submodule("c")(x)


def blocks(order: str = "abc", sketch: Any = stated.RSKFAC, ranks: Any = None, **choices: Any) -> Any:
    torch.manual_seed(5)
    batches = [rows() for _ in range(3)]
    model = Branches(order).double()
    groups = None
    if ranks is not None:
        groups = [{"params": list(model.get_submodule(n).parameters()), "rank": ranks.get(n, 2)} for n in "abc"]
    optimizer = sketch(model, rank=2, params=groups, **SETTINGS, **choices)
    train(model, optimizer, batches)
    return optimizer.state_dict()["curvature"]["blocks"]


CHANGES: dict[str, dict[str, Any]] = {
    "excluding a layer": {"exclude": "a"},
    "another's rank": {"ranks": {"a": 4}},
    "the order of layers": {"order": "cba"},
}


@pytest.mark.parametrize("sketch", [stated.RSKFAC, stated.SREKFAC])
@pytest.mark.parametrize("change", CHANGES)
def test_changing_one_layer_leaves_the_others_bit_for_bit(change: str, sketch: Any) -> None:
    plain, other = blocks(sketch=sketch), blocks(sketch=sketch, **CHANGES[change])
    assert same(plain["b"], other["b"])
    assert same(plain["c"], other["c"])


def test_another_seed_changes_the_sketches_and_no_average() -> None:
    first, second = blocks(seed=0), blocks(seed=1)
    for name in "abc":
        mine, theirs = first[name]["factors"]["input"], second[name]["factors"]["input"]
        assert torch.equal(mine["value"], theirs["value"])
        assert not torch.equal(mine["basis"]["U"], theirs["basis"]["U"])


def test_layers_and_sides_of_equal_shape_draw_differently() -> None:
    found = blocks()
    a, b = (found[name]["factors"]["input"] for name in "ab")
    assert torch.equal(a["value"], b["value"])  # the same inputs
    assert not torch.equal(a["basis"]["U"], b["basis"]["U"])


def test_sampled_labels_do_not_depend_on_which_layers_are_covered() -> None:
    plain, other = blocks(fisher="mc"), blocks(fisher="mc", exclude="a")
    assert same(plain["b"], other["b"])

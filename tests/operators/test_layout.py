"""A layer's flat vector as the matrix that its adapter makes of it, whatever the order of entries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkfac
from operators.cases import Case, compare, dense, trained
from rkfac.operators.layout import layout_from, layout_of

ORDERS: dict[str, Any] = {
    "plain": lambda w: w.flatten(1),
    "transposed": lambda w: w.flatten(1).mT,
    "groups": lambda w: w.reshape(2, 3, 8),
    "channels last": lambda w: w.movedim(1, -1).flatten(1),
    "inputs first": lambda w: w.transpose(0, 1).flatten(1),
    "groups of another order": lambda w: w.reshape(2, 3, 4, 2).movedim(-1, -2).flatten(2),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("order", ORDERS)
def test_is_what_the_adapter_says(order: str, bias: bool) -> None:
    adapter: Any = SimpleNamespace(matrix=lambda module, w: ORDERS[order](w))
    weight = torch.randn(6, 4, 2)
    matrix = ORDERS[order](weight)
    parameters = [weight, torch.randn(matrix.shape[:-1]).flatten()] if bias else [weight]
    layout = layout_of(adapter, nn.Module(), parameters)
    rows = torch.stack([layout.flat(parameters), 2 * layout.flat(parameters)])
    joined = layout.joined(rows)
    expected = torch.cat([matrix, parameters[1].reshape(*matrix.shape[:-1], 1)], -1) if bias else matrix
    assert torch.equal(joined, torch.stack([expected, 2 * expected]))
    assert layout.matrix_shape == tuple(expected.shape)
    assert torch.equal(layout.parted(joined), rows)
    for back, given in zip(layout.shaped(rows[0]), parameters, strict=True):
        assert torch.equal(back, given)
    again = layout_from(layout.numbers(), layout.order)
    assert torch.equal(again.joined(rows), joined)


def test_a_matrix_that_is_no_order_of_entries_is_refused() -> None:
    adapter: Any = SimpleNamespace(matrix=lambda module, w: w.flatten(1) * 0)
    with pytest.raises(ValueError, match="does not lay out a weight of shape"):
        layout_of(adapter, nn.Module(), [torch.randn(3, 2)])


def test_a_layer_of_another_library_has_its_weight_transposed() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = utils.Conv1D(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    optimizer = trained(Case("Conv1D", Wrapped, (9, 4)))
    operator: rkfac.Operator = optimizer.curvature("layer")
    assert operator.unflatten(torch.zeros(15))[0].shape == (4, 3)
    compare(operator, dense(optimizer, "layer"))

"""Weights that a module multiplies by without calling who owns them, as nn.MultiheadAttention does.

While such a module's forward runs, every product of rows with a watched weight, or with some of its rows, is noticed where
torch dispatches it: there the rows are at hand, and the result is the tensor that autograd knows, so that a hook on it sees
the gradient. Nothing of the forward is repeated, replaced or walked through; a product in a form that is not known here is
not noticed, and the layer then says that it got gradients and was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from rkfac import compat
from rkfac.layers.base import Within

Who = TypeVar("Who")
aten = torch.ops.aten

# Where rows and weight stand among an operation's arguments, and whether the weight stands there transposed.
PRODUCTS: Mapping[Any, tuple[int, int, bool]] = {
    aten.addmm.default: (1, 2, True),
    aten.mm.default: (0, 1, True),
    aten.linear.default: (0, 1, False),
}


@dataclass(frozen=True, eq=False)
class Noticed(Generic[Who]):
    """rows (positions x samples, d_in) times some rows of a weight, and where in its outputs (first, behind) these stand."""

    who: Who
    rows: Tensor
    result: Tensor
    around: tuple[int, int]

    def fits(self, samples: int) -> bool:
        """Whether the rows can be those of so many samples."""
        return samples > 0 and self.rows[..., 0].numel() % samples == 0

    def inputs(self, samples: int) -> Tensor:
        """(samples, positions, d_in)."""
        return _by_sample(self.rows.detach(), samples)

    def laid_out(self, samples: int) -> Callable[[Tensor], Tensor]:
        """What turns a gradient at the result into one at all outputs; it holds nothing of the graph, which will hold it."""
        return partial(_among_all, samples, self.around)


def _by_sample(t: Tensor, samples: int) -> Tensor:
    return t.reshape(-1, samples, t.shape[-1]).transpose(0, 1)


def _among_all(samples: int, around: tuple[int, int], g: Tensor) -> Tensor:
    """(samples, positions, d_out): zero where no product was made."""
    g = _by_sample(g, samples)
    return nn.functional.pad(g, around) if any(around) else g


class Inside(Generic[Who]):
    """The inside of one module: whose weights are looked for there, and what was noticed since it was entered."""

    def __init__(self, within: Within) -> None:
        self.within = within
        self.watching: list[Who] = []
        self._weights: list[tuple[Callable[[], nn.Parameter | None], Who]] = []
        self._products: _Products[Who] | None = None

    def watch(self, weight: Callable[[], nn.Parameter | None], who: Who) -> None:
        """Look for one weight more; asked for when it is used, since another tensor may stand in its place then."""
        self.watching.append(who)
        self._weights.append((weight, who))

    @property
    def entered(self) -> bool:
        """Whether its forward runs and is looked at."""
        return self._products is not None

    def enter(self) -> None:
        """Its forward begins."""
        self.let_go()
        found = ((weight(), who) for weight, who in self._weights)
        self._products = _Products({id(weight): (weight, who) for weight, who in found if weight is not None})
        self._products.__enter__()

    def let_go(self) -> list[Noticed[Who]]:
        """Its forward is over: look no more, and tell what was noticed."""
        products, self._products = self._products, None
        if products is None:
            return []
        if (
            products.innermost
        ):  # it is, unless an interrupt tore the stack of modes: then it looks at nothing from now on
            products.__exit__(None, None, None)
        noticed, products.noticed = products.noticed, None
        return noticed or []


class _Products(compat.Dispatch, Generic[Who]):
    """Notices products while it is entered."""

    def __init__(self, weights: Mapping[int, tuple[nn.Parameter, Who]]) -> None:
        super().__init__()
        self.noticed: list[Noticed[Who]] | None = []  # None: it is over
        self._weights = weights
        self._copies: dict[int, tuple[Tensor, nn.Parameter, int]] = {}  # in another precision, and from which row on

    def ran(self, operation: Any, args: tuple[Any, ...], result: Any) -> None:
        """Remember products, and copies that autocast makes of what is looked for."""
        if self.noticed is None:
            return
        if operation is aten._to_copy.default:
            if (found := self._rows_of(args[0], args[0])) is not None:
                self._copies[id(result)] = result, *found
        elif operation in PRODUCTS:
            rows, weight, transposed = PRODUCTS[operation]
            matrix = args[weight]
            found = self._rows_of(matrix, matrix.mT if transposed else matrix)
            if found is not None:
                parameter, first = found
                around = first, parameter.shape[0] - first - result.shape[-1]
                self.noticed.append(Noticed(self._weights[id(parameter)][1], args[rows], result, around))

    def _rows_of(self, tensor: Tensor, matrix: Tensor) -> tuple[nn.Parameter, int] | None:
        """The watched weight that a matrix is some rows of, and the first of them; None: of no such weight, or not rows."""
        base, first = compat.base_of(tensor), 0
        if id(base) in self._copies:
            _, parameter, first = self._copies[id(base)]
        elif id(base) in self._weights:
            parameter = self._weights[id(base)][0]
        else:  # autocast's copy of a whole weight from an earlier call
            behind = compat.parameter_behind(tensor)
            if behind is None or id(behind) not in self._weights:
                return None
            parameter = self._weights[id(behind)][0]
            if matrix.shape != parameter.shape:
                return None
        if matrix.ndim != 2 or matrix.shape[1:] != base.shape[1:] or matrix.stride() != base.stride():
            return None
        skipped, odd = divmod(int(matrix.storage_offset()) - int(base.storage_offset()), max(1, base.stride(0)))
        return None if odd else (parameter, first + skipped)

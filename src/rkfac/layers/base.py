"""The adapter contract: what is known of a module's calls.

A Kronecker adapter turns a module's input x and the gradient at its output into rows a (n, d_in) and g (n, d_out) such
that sum_n g_n a_n^T is the gradient of the weight as a matrix, the bias being the last column of a (all ones). Rows of a
grouped convolution carry a leading group dimension. With weight_sharing="reduce" positions are averaged (a) and summed
(g) within a sample, the first dimension being the samples, and n is their number.
A unit adapter serves scale-and-shift layers: gradients (n, units, 1 or 2), a sample each.
`drawn` are the numbers of the rows that are wanted, fewer than the call has; None: all. The others are never made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rkfac import compat

ROUNDED = 8  # roundings, times the root of their number, up to which a sum of gradients is none
MAX_CHUNK = 1 << 24  # elements of unfolded rows held at once: 64 MB in float32


class Adapter(ABC):
    """What every adapter says about a module, and which of its parameters it speaks of."""

    weight_name: str = "weight"
    bias_name: str | None = "bias"  # None: no bias ever takes part
    unlike_its_ancestors: ClassVar[bool] = False  # whether a block for its ancestors would misread it

    def plain_weight(self, module: nn.Module) -> nn.Parameter | None:
        """The weight as a parameter of the module's own; None: it is missing, or made of others (parametrized)."""
        return compat.own_parameter(module, self.weight_name)

    def weight(self, module: nn.Module) -> nn.Parameter:
        """The same, of a module that is served."""
        weight = self.plain_weight(module)
        assert weight is not None  # or no adapter would serve it
        return weight

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        """The bias, trained or not."""
        return None if self.bias_name is None else compat.own_parameter(module, self.bias_name)

    def refusal(self, module: nn.Module) -> str:
        """Why this very module cannot be covered, or an empty string."""
        return ""

    def has_bias(self, module: nn.Module) -> bool:
        """Whether a bias (or shift) takes part: one that is trained."""
        bias = self.bias(module)
        return bias is not None and bias.requires_grad

    @abstractmethod
    def gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """The weight's gradient that one call with input x and output gradient g explains."""

    @abstractmethod
    def count(self, module: nn.Module, g: Tensor, sharing: str) -> int:
        """How many rows a call with output gradient g has."""

    @abstractmethod
    def positions(self, module: nn.Module, g: Tensor) -> int:
        """How many positions the output has, of all samples: what a loss may average over."""

    def samples(self, module: nn.Module, x: Tensor) -> int | None:
        """Samples in an input, where its shape says so for certain; None: every leading position counts as one."""
        return None


class KroneckerAdapter(Adapter):
    """A layer whose weight gradient is a sum of outer products g a^T."""

    rowwise: ClassVar[bool] = False  # whether rows are the layer's own input and output, (..., d) each

    @abstractmethod
    def input_rows(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Rows a in chunks, (n, d_in[+1]) or (groups, n, d_in[+1])."""

    def input_moment(
        self, module: nn.Module, x: Tensor, bias: bool, sharing: str
    ) -> Callable[[Tensor], list[Tensor]] | None:
        """What makes the second moment of unit * a, given the unit, where that is faster without rows; None: nothing does.

        Its upper block rows, each (rows, d_in[+1] - its first row), as new tensors.
        """
        return None

    @abstractmethod
    def output_rows(self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None) -> Tensor:
        """Rows g, (n, d_out) or (groups, n, d_out)."""

    @abstractmethod
    def input_shape(self, module: nn.Module, bias: bool) -> tuple[int, ...]:
        """Shape of the input factor: (d_in[+1],) twice in one, or (groups, d_in[+1])."""

    @abstractmethod
    def output_shape(self, module: nn.Module) -> tuple[int, ...]:
        """Likewise of the output factor."""

    def positions(self, module: nn.Module, g: Tensor) -> int:
        """Every position has a row."""
        return self.count(module, g, "expand")

    def by_sample(
        self, module: nn.Module, x: Tensor, g: Tensor, bias: bool, sharing: str, drawn: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows sample by sample, ([groups,] N, positions, d_in[+1]) and ([groups,] N, positions, d_out).

        The gradient of one sample is sum over its positions of g a^T. Where no dimension is known to be the samples',
        every position is a sample of its own ("expand") or the first one is ("reduce"). `drawn` are numbers of samples.
        """
        if drawn is not None and (sharing == "reduce" or self.samples(module, x) is not None):
            x, g, drawn = x[drawn], g[drawn], None
        samples = self.samples(module, x)
        samples = self.count(module, g, sharing) if samples is None else samples
        inputs = torch.cat(list(self.input_rows(module, x, bias, "expand", drawn)), -2)
        gradients = self.output_rows(module, x, g, "expand", drawn)
        if drawn is not None:
            samples = len(drawn)
        return inputs.unflatten(-2, (samples, -1)), gradients.unflatten(-2, (samples, -1))

    def diagonal_input(self) -> bool:
        """Whether inputs are one-hot: the input factor is diagonal, counts all rows and forms (or draws) none."""
        return False

    @abstractmethod
    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as a matrix (d_out, d_in), a view where the memory layout allows it."""

    def columns(self, module: nn.Module) -> Tensor | None:
        """Which column of `matrix` each column of `stored` is, where the weight's memory has another order; None: the same."""
        return None

    def stored(self, module: nn.Module, weight: Tensor) -> Tensor:
        """As `matrix`, with columns in the order of the weight's own memory: a view of anything laid out like it."""
        return self.matrix(module, weight)

    def joined(self, module: nn.Module, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """One tensor a parameter, the weight's alone or with the bias's, as one matrix whose last column is the bias."""
        matrix = self.matrix(module, tensors[0]).to(dtype)
        if len(tensors) == 1:
            return matrix
        return torch.cat([matrix, self.vector(module, tensors[1]).to(dtype)[..., None]], dim=-1)

    def parted(self, module: nn.Module, matrix: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inverse of `joined`, in the shapes of `like`."""
        if len(like) == 1:
            return (self.tensor(module, matrix),)
        return self.tensor(module, matrix[..., :-1]), matrix[..., -1].reshape(like[1].shape)

    def vector(self, module: nn.Module, bias: Tensor) -> Tensor:
        """A tensor of the bias's shape as rows of the matrix."""
        return bias

    def gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """sum g a^T."""
        rows, at = self.output_rows(module, x, g, "expand"), 0
        total: Tensor | None = None
        for a in self.input_rows(module, x, False, "expand"):
            part = rows[..., at : at + a.shape[-2], :].mT @ a
            total, at = part if total is None else total + part, at + a.shape[-2]
        assert total is not None
        return self.tensor(module, total)

    def tensor(self, module: nn.Module, matrix: Tensor) -> Tensor:
        """A matrix (d_out, d_in) as a tensor of the weight's shape: the inverse of `matrix`."""
        return matrix.reshape(self.weight(module).shape)


class UnitAdapter(Adapter):
    """A layer that scales and shifts each unit: its Fisher is a small block a unit."""

    @abstractmethod
    def unit_gradients(
        self, module: nn.Module, x: Tensor, g: Tensor, sharing: str, drawn: Tensor | None = None
    ) -> Tensor:
        """Gradients (n, units, 2) of (scale, shift), a sample each, or (n, units, 1) without a trained shift."""

    def positions(self, module: nn.Module, g: Tensor) -> int:
        """All units are at every position."""
        return g.numel() // self.weight(module).numel()

    def gradient(self, module: nn.Module, x: Tensor, g: Tensor) -> Tensor:
        """The sum over samples of the scale's part."""
        return self.unit_gradients(module, x, g, "reduce").sum(0)[:, 0].reshape(self.weight(module).shape)


class Container(ABC):
    """A module that multiplies by weights, its own and its children's, without calling the modules they belong to.

    Its products are found while its forward runs (`curvature/inside.py`); the rows of each are (positions, samples).
    """

    @abstractmethod
    def inner(self, module: nn.Module) -> Mapping[str, tuple[nn.Module, KroneckerAdapter]]:
        """Who owns each weight and what its products mean, by the name it has inside ("" for the module's own)."""

    @abstractmethod
    def samples(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """How many samples a call with these arguments has."""


@dataclass(frozen=True)
class Uncovered:
    """A module no adapter serves, and why."""

    reason: str


NOT_PLAIN = Uncovered("its weight is not a plain parameter (missing or parametrized)")


@dataclass(frozen=True, eq=False)
class Within:
    """The module whose forward uses a weight without calling its owner, and what is known of that forward."""

    module: nn.Module
    container: Container


@dataclass(frozen=True, eq=False)
class Use:
    """A module that owns a weight, under the name that a person knows it by, and what its calls mean.

    `within`: it is never called itself.
    """

    name: str
    module: nn.Module
    adapter: Adapter
    within: Within | None = None

    @property
    def weight(self) -> nn.Parameter:
        """What it uses."""
        return self.adapter.weight(self.module)

    @property
    def called(self) -> nn.Module:
        """The module whose calls tell of it."""
        return self.module if self.within is None else self.within.module


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Statistics never go below float32, whatever autocast did to the forward pass."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def precise(x: Tensor) -> Tensor:
    """The same numbers in float32 or better; indices stay what they are."""
    return x.to(statistics_dtype(x)) if x.is_floating_point() else x


def by_position(x: Tensor, drawn: Tensor | None, trailing: int = 1) -> Tensor:
    """(..., d) -> (n, d): a row a leading position, or the drawn ones of them without a copy of the others."""
    if drawn is None or x.is_contiguous():
        rows = x.reshape(-1, *x.shape[x.ndim - trailing :])
        return rows if drawn is None else rows.index_select(0, drawn)  # twice as fast as an index a dimension
    leading = x.shape[: x.ndim - trailing]
    return x[torch.unravel_index(drawn, leading) if len(leading) > 1 else drawn]


def sum_of_positions(rows: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Gradients (of this dtype when they came) summed over a sample's positions; zero where nothing but rounding is left.

    What shifts all keys of an attention alike changes nothing, so that gradients of keys sum up to zero: a curvature made of
    what rounding leaves of that would be as good as none, and its inverse would be taken for a direction.
    """
    total = rows.sum(dim)
    if not total.numel():
        return total
    rounding = ROUNDED * rows.shape[dim] ** 0.5 * torch.finfo(dtype).eps
    return total * (total.abs().amax() > rounding * rows.abs().amax())


def append_one(rows: Tensor, bias: bool) -> Tensor:
    """The bias is the last column of the input rows."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1) if bias else rows

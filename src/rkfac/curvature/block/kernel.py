"""The kernel of one batch's samples: how much of it is looked at, the inverse that is made of it, and how that is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.damping import in_units_of
from rkfac.layers.base import statistics_dtype
from rkfac.linalg import Everything, Formed, Grid, Outer, Places, Rows, Sample, Woodbury


@dataclass(frozen=True)
class Sketch:
    """How much of the samples' gradients is looked at; every field is an argument of `SENG`."""

    columns: int | None = 256
    scaling: str = "unbiased"
    product: str = "exact"
    positions: int | None = 16
    explicit_up_to: int = 700_000
    norms: str = "curvature"

    def __post_init__(self) -> None:
        for name in ("columns", "positions"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer >= 1, or None for all, got {value!r}")
        if isinstance(self.explicit_up_to, bool) or not isinstance(self.explicit_up_to, int) or self.explicit_up_to < 0:
            raise ValueError(f"explicit_up_to must be an integer >= 0, got {self.explicit_up_to!r}")
        choices = {
            "scaling": ("unbiased", "published"),
            "product": ("exact", "published"),
            "norms": ("curvature", "published"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class Basis:
    """The inverse in units of the rows, and what U^T U of them is multiplied by to be F."""

    inverse: Woodbury
    size: float

    def damping(self, damping: float, relative_to: str | None) -> Tensor:
        """l in the units of the rows, one float64 number: absolute, or so many of F's mean or largest eigenvalues."""
        values = self.inverse.values
        if relative_to is None:
            return torch.full_like(values[0], damping / self.size)
        of = values.sum() / self.inverse.rows.entries if relative_to == "mean" else values[0]
        # Where nothing was seen the gradient stays what it is.
        return torch.where(of > 0, in_units_of(damping, of), torch.full_like(of, 1 / self.size))


def tensors_of(rows: Rows) -> tuple[Tensor, ...]:
    """What it is made of."""
    return tuple(t for t in vars(rows).values() if isinstance(t, Tensor))


def saved(basis: Basis) -> dict[str, Any]:
    """Tensors, numbers and strings only."""
    inverse = basis.inverse
    return {
        "size": basis.size,
        "mixed": inverse.mixed,
        "shape": list(inverse.rows.shape),
        "rows": {name: t for name, t in vars(inverse.rows).items() if isinstance(t, Tensor)},
        "sample": {name: t for name, t in vars(inverse.sample).items() if t is not None},
        "values": inverse.values,
        "vectors": inverse.vectors,
    }


def loaded(state: Mapping[str, Any], weight: Tensor) -> Basis:
    """On the weight's device, as copies."""
    dtype, device = statistics_dtype(weight), weight.device

    def number(t: Any, precision: torch.dtype, dims: int) -> Tensor:
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.ndim != dims:
            raise ValueError("the saved gradients of a layer are no tensors of floating point, or of another shape")
        if not bool(torch.isfinite(t).all()):
            raise ValueError("the saved gradients of a layer hold NaN or Inf")
        return t.to(device, precision, copy=True)

    rows: Rows
    shape = tuple(int(n) for n in state["shape"])
    if state["rows"].keys() == {"U"}:
        rows = Formed(number(state["rows"]["U"], dtype, 2), shape)
        count = len(rows.U)
        fits = rows.U.shape[1] == math.prod(shape)
    else:
        rows = Outer(number(state["rows"]["G"], dtype, 4), number(state["rows"]["X"], dtype, 4))
        count = rows.G.shape[1]
        fits = rows.G.shape[:3] == rows.X.shape[:3] and rows.shape == shape
    drawn = {name: _places(t).to(device) for name, t in state["sample"].items()}
    sample: Sample = Everything()
    if drawn.keys() == {"places"}:
        sample = Places(drawn["places"])
        fits = fits and int(drawn["places"].max()) < math.prod(shape)
    elif drawn:
        sample = Grid(drawn.get("i"), drawn.get("j"))
        sides = {"i": shape[1], "j": shape[2]}
        fits = fits and isinstance(rows, Outer) and all(int(t.max()) < sides[name] for name, t in drawn.items())
    values, vectors = number(state["values"], torch.float64, 1), number(state["vectors"], torch.float64, 2)
    size, mixed = state["size"], state["mixed"]
    known = isinstance(size, float) and 0 < size < math.inf and isinstance(mixed, bool) and bool((values >= 0).all())
    if not (fits and known and len(values) == count and vectors.shape == (count, count)):
        raise ValueError("the saved gradients of a layer do not fit together")
    if mixed and not isinstance(rows, Outer):
        raise ValueError("the saved gradients of a layer are formed, and cannot be mixed")
    return Basis(Woodbury(rows, sample, sample.of(rows), values, vectors, mixed), size)


def _places(t: Any) -> Tensor:
    if not isinstance(t, Tensor) or t.dtype != torch.int64 or t.ndim != 1 or not len(t) or int(t.min()) < 0:
        raise ValueError(f"the saved state sampled {t!r}")
    return t.clone()

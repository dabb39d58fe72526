"""What a solution adds to a parameter: formed, or as a correction of the vector it was made from.

The vector is asked for again when a part is added to something, as the sum of `terms`, so that nobody has to keep it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkfac.linalg.host import Number, add_multiple, kept
from rkfac.linalg.scaling import SAFE
from rkfac.linalg.shapes import Float

Terms = Sequence[tuple[Tensor, float]]  # what a vector is the sum of, with their coefficients
PANEL = 1 << 20  # entries that are worked on at once in another precision than their own


class Part(ABC):
    """One parameter's share of S, in units of the solution's scale; `terms` add up to what was preconditioned."""

    @abstractmethod
    def add_to(self, target: Tensor, amount: Number, terms: Terms, keep: float = 1.0) -> None:
        """target <- keep * target + amount * share, in place."""

    @abstractmethod
    def masked(self, keep: Tensor) -> Part:
        """The same where `keep` (one truth value on the device) holds, zero elsewhere; without a synchronisation."""

    def formed(self, like: Tensor, terms: Terms) -> Tensor:
        """The share itself in float64 (inspection, tests and rare cases)."""
        whole = torch.zeros_like(like, dtype=torch.float64)
        self.add_to(whole, 1.0, terms)
        return whole


def same(tensor: Tensor) -> Tensor:
    """The view of a tensor that is a matrix already."""
    return tensor


@dataclass(frozen=True, eq=False)
class Whole(Part):
    """A share that was formed, entries of about one; `matrix` views a tensor like the parameter in its shape."""

    tensor: Tensor
    matrix: Callable[[Tensor], Tensor] = same

    def add_to(self, target: Tensor, amount: Number, terms: Terms, keep: float = 1.0) -> None:
        """In one pass where precision and memory allow it."""
        if keep != 1.0:
            target.mul_(keep)
        into = self.matrix(target)
        if not shares_memory(into, target):
            whole = _room(target, self.tensor.dtype, self.matrix)
            self.add_to(whole, amount, terms)
            target.add_(whole.to(target.dtype))
        elif target.dtype == self.tensor.dtype:
            add_multiple(into, self.tensor, amount)
        else:
            into.add_((self.tensor * amount).to(target.dtype))

    def place(self, target: Tensor) -> Tensor | None:
        """Where its entries belong in a tensor like the parameter; None: it is not of that precision, or has no such view."""
        into = self.matrix(target)
        return into if target.dtype == self.tensor.dtype and shares_memory(into, target) else None

    def masked(self, keep: Tensor) -> Whole:
        """Zero, or the same."""
        return replace(self, tensor=torch.where(keep, self.tensor, torch.zeros_like(self.tensor)))


@dataclass(frozen=True, eq=False)
class Itself(Part):
    """What the terms add up to, `amount` times or, where it is refused, not at all."""

    share: Number = 1.0

    def add_to(self, target: Tensor, amount: Number, terms: Terms, keep: float = 1.0) -> None:
        """A pass for each term."""
        if keep != 1.0:
            target.mul_(keep)
        amount = amount * self.share
        if not isinstance(amount, Tensor):
            if amount == 0:
                return
            if SAFE[0] ** 2 < abs(amount) < SAFE[1] ** 2:
                for term, coefficient in terms:
                    add_multiple(target, term.to(target.dtype), amount * coefficient)
                return
        # A number that float32 does not hold may be the multiple of something as small as it is large.
        for term, coefficient in terms:
            target.add_((term.double() * (amount * coefficient)).to(target.dtype))

    def masked(self, keep: Tensor) -> Itself:
        """None of it, or the same."""
        return Itself(kept(self.share, keep))


@dataclass(frozen=True, eq=False)
class Corrected(Part):
    """rest * unit * J + left @ right, J being the sum of `terms`; `matrix` views a tensor like the parameter as J is.

    `rest` None: J takes no part, for nothing was discarded. `unit` None: J is of moderate size.
    """

    matrix: Callable[[Tensor], Tensor]
    rest: Number | None  # one a group
    unit: Number | None
    left: Float[Tensor, "*batch dg k"]
    right: Float[Tensor, "*batch k dw"]

    def add_to(self, target: Tensor, amount: Number, terms: Terms, keep: float = 1.0) -> None:
        """The thin product first, then J: nothing of the target's size is made on the way."""
        dtype, into = self.left.dtype, self.matrix(target)
        if (
            target.dtype != dtype and into.ndim == 2 and shares_memory(into, target)
        ):  # weights of 16 bits, a basis of 64
            self._add_in_panels(into, amount, terms, keep)
            return
        if target.dtype != dtype or not shares_memory(into, target):  # groups of these, odd strides
            whole = _room(target, dtype, self.matrix)
            self.add_to(whole, amount, terms)
            target.mul_(keep).add_(whole.to(target.dtype))
            return
        amount = amount.to(dtype) if isinstance(amount, Tensor) else amount
        rest = None if self.rest is None else amount * self.rest
        rest = rest[..., None, None] if isinstance(rest, Tensor) and rest.ndim else rest
        own = sum(coefficient for term, coefficient in terms if term is target)
        if own and rest is not None:  # while it still is what the terms say
            into.mul_(keep + own * (rest if self.unit is None else rest * self.unit))
            keep = 1.0
        add = torch.Tensor.addmm_ if into.ndim == 2 else torch.Tensor.baddbmm_
        add(into, self.left * amount, self.right, beta=keep)
        if rest is None:
            return
        for term, coefficient in terms:
            if term is not target:
                J = self.matrix(term).to(dtype)
                add_multiple(into, J if self.unit is None else J * self.unit, rest * coefficient)

    def _add_in_panels(self, into: Tensor, amount: Number, terms: Terms, keep: float) -> None:
        """A few rows at a time in the wider precision, so that nothing of the target's size is made."""
        rest = None if self.rest is None else amount * self.rest
        some = max(1, PANEL // into.shape[-1])
        for begin in range(0, len(into), some):
            rows = slice(begin, begin + some)
            part = (self.left[rows] * amount) @ self.right
            if rest is not None:
                for term, coefficient in terms:
                    J = self.matrix(term)[rows].to(part.dtype)
                    add_multiple(part, J if self.unit is None else J * self.unit, rest * coefficient)
            into[rows].mul_(keep).add_(part.to(into.dtype))

    def masked(self, keep: Tensor) -> Corrected:
        """Without J and with thin matrices of zeros."""
        left, right = (torch.where(keep, t, torch.zeros_like(t)) for t in (self.left, self.right))
        rest = None if self.rest is None else kept(self.rest, keep)
        return replace(self, left=left, right=right, rest=rest)


def _room(like: Tensor, dtype: torch.dtype, matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """Zeros in the shape of a tensor that `matrix` can view: in the usual order of dimensions, or with channels last."""
    plain = torch.zeros(like.shape, dtype=dtype, device=like.device)
    if shares_memory(matrix(plain), plain):
        return plain
    return torch.zeros(like.movedim(1, -1).shape, dtype=dtype, device=like.device).movedim(-1, 1)


def shares_memory(view: Tensor, tensor: Tensor) -> bool:
    """Whether writing into what was meant as a view writes into the tensor: reshaping may have made a copy."""
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

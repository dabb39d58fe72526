"""What a step asks of a wide Linear layer's gradient, had from the rows it is the sum of while these pass by.

A hook sees inputs and output gradients in every backward pass and makes the shadow of their product on the kept modes; the
shadow of a momentum buffer follows from it step by step. Nobody is trusted: what is about to be preconditioned is looked at
along two random directions, and where that disagrees (a gradient that was changed, dropped, came another way or in 16 bits;
a buffer that somebody wrote to) the shadow is made from the matrix itself, as without all this. A gradient that was scaled
as a whole, by a clip or an unscaling, is recognised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rkfac import compat
from rkfac.curvature.hooks import Hook, first_tensor, full_precision
from rkfac.linalg import AGREEMENT, LowRank, Modes, Number, Shadow

PATIENCE = 4  # steps in vain after which a basis is not followed any more; the next one is tried again


class Blend(NamedTuple):
    """gradient * (a gradient) + buffer * (the momentum before it)."""

    gradient: float
    buffer: float


class Mixture(NamedTuple):
    """What is preconditioned, and what the momentum will be; None: nobody keeps any."""

    vector: Blend
    momentum: Blend | None


class Origin(NamedTuple):
    """Where the vectors come from that are preconditioned: a mixture, the same for all, with these gradients in it."""

    mixture: Mixture
    gradients: tuple[Tensor, ...]


def few(rows: int, d_G: int, d_A: int) -> bool:
    """Whether projecting rows costs less than half of projecting the matrix they sum up to."""
    return 2 * rows * (d_G + d_A) < d_G * d_A


class Follower:
    """The shadows of one layer's coming gradient and of its momentum, for one basis."""

    def __init__(self, G: LowRank, A: LowRank, number: int) -> None:
        self.modes = Modes(G.U, A.U, number)
        self.dtype = G.U.dtype
        self.fresh: Shadow | None = None  # of the gradient since the last step
        self.momentum: Shadow | None = None
        self.followed = 0  # steps for which no matrix had to be projected
        self.in_vain = 0  # steps in a row whose rows were of no use

    @property
    def watches(self) -> bool:
        """Whether rows are looked for: not for a program whose gradients are never what its rows say."""
        return self.in_vain < PATIENCE

    def fits(self, g: Tensor, a: Tensor, bias: bool) -> bool:
        """Whether these can be the rows of a gradient, and few enough to be worth it."""
        d_G, d_A = len(self.modes.U_G), len(self.modes.U_A)
        shapes = (g.shape[-1], a.shape[-1] + bias, len(g)) == (d_G, d_A, len(a))
        return shapes and g.dtype == a.dtype == self.dtype and few(len(g), d_G, d_A)

    def saw(self, g: Tensor, a: Tensor, last: Tensor | None) -> None:
        """Rows of a backward pass."""
        if not self.watches or not self.fits(g, a, last is not None):
            return
        shadow = self.modes.of_rows(g, a, last)
        self.fresh = shadow if self.fresh is None else self.fresh.mixed(1.0, shadow, 1.0)

    def drop(self) -> None:
        """The gradient is gone."""
        self.fresh = None

    def unasked(self) -> None:
        """A step for which nobody can follow anything."""
        self.drop()
        self.momentum, self.in_vain = None, self.in_vain + 1

    def shadow(self, J: Tensor, j: Tensor | None, square: Number, origin: Origin) -> Shadow:
        """Of [J | j], whose squared length is given."""
        fresh, momentum, self.fresh, self.momentum = self.fresh, self.momentum, None, None
        if not math.isfinite(square):  # the gate's business, and nothing to remember
            return self.modes.of(J, j)
        vector, remembered = origin.mixture
        scale = self._scale(J, j, square, vector, fresh, momentum)
        if scale is None or fresh is None:
            self.in_vain += fresh is not None and (momentum is not None or not vector.buffer)
            shadow = self.modes.of(J, j)
            self.momentum = self._remembered(shadow, fresh, origin)
            return shadow
        self.followed, self.in_vain = self.followed + 1, 0
        shadow = fresh.mixed(scale * vector.gradient, momentum, vector.buffer)
        if remembered is not None:
            same = vector == remembered
            self.momentum = shadow if same else fresh.mixed(scale * remembered.gradient, momentum, remembered.buffer)
        return shadow

    def _remembered(self, shadow: Shadow, fresh: Shadow | None, origin: Origin) -> Shadow | None:
        """The coming momentum's shadow, from that of the vector and, where these differ, of the gradient."""
        vector, remembered = origin.mixture
        if remembered is None or vector == remembered:
            return None if remembered is None else shadow
        J, *rest = (g.to(self.dtype) for g in origin.gradients)
        j = rest[0] if rest else None
        square = sum(torch.linalg.vector_norm(g).item() ** 2 for g in (J, *rest))
        scale = self._scale(J, j, square, Blend(1.0, 0.0), fresh, None)
        if scale is None or fresh is None or not vector.buffer:
            return None
        before = shadow.mixed(1 / vector.buffer, fresh, -scale * vector.gradient / vector.buffer)
        return fresh.mixed(scale * remembered.gradient, before, remembered.buffer)

    def _scale(
        self, J: Tensor, j: Tensor | None, square: Number, blend: Blend, fresh: Shadow | None, momentum: Shadow | None
    ) -> float | None:
        """By what the gradient was multiplied on its way from the rows to this blend of it; None: that does not explain J."""
        if fresh is None or (blend.buffer and momentum is None):
            return None
        expected = self.modes.seen(fresh).double() * blend.gradient
        left = self.modes.looked_at(J, j).double()
        if momentum is not None:
            left -= self.modes.seen(momentum).double() * blend.buffer
        rounding = AGREEMENT * torch.finfo(self.dtype).eps * float(square) ** 0.5
        fitted = float(left @ expected / (expected @ expected).clamp_min(torch.finfo(torch.float64).tiny))
        for scale in (1.0, fitted):
            if float(torch.linalg.vector_norm(left - scale * expected)) <= rounding:
                return scale
        return None

    def state_dict(self) -> dict[str, Any]:
        """The momentum's shadow: what it would be made anew differs in its last digits."""
        known = self.momentum
        return {"in_vain": self.in_vain} | ({} if known is None else {"output": known.output, "input": known.input})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        self.in_vain = state["in_vain"]
        if isinstance(self.in_vain, bool) or not isinstance(self.in_vain, int) or self.in_vain < 0:
            raise ValueError(f"the saved state counts {self.in_vain!r} steps in vain")
        if "output" not in state:
            return
        U_G, U_A = self.modes.U_G, self.modes.U_A
        for side, shape in (("output", (U_G.shape[1], len(U_A))), ("input", (len(U_G), U_A.shape[1]))):
            found = state[side]
            if not isinstance(found, Tensor) or found.shape != shape or not bool(torch.isfinite(found).all()):
                raise ValueError(f"the saved state has no projection of the momentum onto {side} modes of {shape}")
        self.momentum = Shadow(*(state[side].clone().to(U_G) for side in ("output", "input")))


class Followed(Protocol):
    """A layer whose gradients are followed while it has a `follower`."""

    module: nn.Module
    weight: nn.Parameter
    bias: bool
    follower: Follower | None

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count the seconds spent in a phase."""


class RowHook(Hook):
    """Watches the output of a Linear layer for the gradients that arrive there; changes nothing."""

    def __init__(self, layer: Followed) -> None:
        super().__init__(None)
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or self.layer.follower is None or not torch.is_grad_enabled():
            return
        if not self.layer.follower.watches or not self.layer.weight.requires_grad or module is not self.layer.module:
            return
        x = first_tensor((*args, *kwargs.values()))
        if x is None or not isinstance(output, Tensor) or not output.requires_grad:
            return
        # Where activations are packed away or recomputed, nothing of them is to be kept.
        if not compat.inside_functional_transform() and not compat.saved_otherwise():
            compat.behind_view(output).register_hook(_Passing(self.layer, x.detach()))


class _Passing(Hook):
    """One call's input, waiting for the gradient at its output."""

    def __init__(self, layer: Followed, x: Tensor) -> None:
        super().__init__(None)
        self.layer = layer
        self.x: Tensor | None = x

    def __call__(self, g: Tensor) -> None:
        layer, follower = self.layer, self.layer.follower
        x, self.x = self.x, None  # the graph may outlive its backward pass, as part of a loss that somebody keeps
        if follower is None or x is None or torch.is_grad_enabled() or not g.ndim or not x.ndim:
            return
        with layer.timed("apply"), full_precision([g.device]):
            rows, inputs = (t.reshape(-1, t.shape[-1]) for t in (g, x))
            follower.saw(rows, inputs, inputs.new_ones(len(inputs)) if layer.bias else None)

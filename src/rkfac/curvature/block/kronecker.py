"""Linear, convolution and embedding layers: two running factors, a damping rule, the two-sided solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkfac.curvature.block.base import Block
from rkfac.curvature.block.direction import Direction
from rkfac.curvature.block.settings import Group, Settings
from rkfac.curvature.decompose import Request
from rkfac.curvature.factor import DenseFactor, DiagonalFactor, Factor, IdentityFactor, Refreshed
from rkfac.curvature.following import Follower, Origin, few
from rkfac.layers.base import KroneckerAdapter, Use, statistics_dtype
from rkfac.linalg import (
    SAFE,
    DecompositionError,
    Diagonal,
    Intact,
    Itself,
    LowRank,
    Multipliers,
    Number,
    Part,
    Preconditioner,
    Rowwise,
    Seer,
    Whole,
    at_once,
    inverses,
    number,
    peak,
    preconditioner,
    root,
    unit_of,
)

ROWS_A_RANK = 32  # an automatic rank is a 32nd of the batch at most: applied, a twentieth of forward and backward
LEAST_AFFORDABLE = 32  # fewer were worse on the digits (docs/performance.md)
SMALL_LAYER = 40_000  # entries of a weight below which operations cost more than the flops of any rank
INVERTED = 5.2e7  # flops that applying two whole inverses may take: up to there no thin product on a CPU is quicker
WIDE = (
    640  # width of a factor from which its inverse, which is cubic, takes longer than a sketch that is applied for less
)


class KroneckerBlock(Block):
    """S = (G + l I)^-1 J (A + l I)^-1 or one of its kin, with the bias as last column of J."""

    kind = "Kronecker"

    def __init__(self, uses: Sequence[Use], adapter: KroneckerAdapter, settings: Settings) -> None:
        self.adapter = adapter
        super().__init__(uses, adapter, settings)

    def _make(self) -> None:
        """A factor for each side."""
        self.input: Factor[Any] = self._factor("input", self.adapter.input_shape(self.module, self.bias), self._like)
        self.output: Factor[Any] = self._factor("output", self.adapter.output_shape(self.module), self._like)
        self._prepared: tuple[tuple[Any, ...], Preconditioner] | None = None
        self._in_backward: bool | None = None  # not decided yet
        self._followed: tuple[Any, ...] | None = None  # what it was decided for whether rows are followed
        self._pinned: tuple[tuple[Any, ...], Rowwise | None] | None = None  # with the version and damping it is for
        self.rowwise, self.natural, self.follower = None, False, None

    @property
    def _like(self) -> Tensor:
        """Where factors are, and in which precision."""
        return torch.empty(0, dtype=statistics_dtype(self.weight), device=self.weight.device)

    def _factor(self, side: str, shape: tuple[int, ...], like: Tensor) -> Factor[Any]:
        """What keeps the average of one side: a diagonal for one-hot inputs, nothing for a side that is left out."""
        if self.settings.sides not in ("both", side):
            return IdentityFactor(shape, self.settings.start, like)
        if side == "input" and self.adapter.diagonal_input():
            return DiagonalFactor(shape, self.settings.start, like)
        return self.wide_factor(shape, self.settings.start, like)

    wide_factor: ClassVar[Callable[..., Factor[Any]]] = DenseFactor  # of every other side

    @property
    def factors(self) -> Mapping[str, Factor[Any]]:
        """A and G."""
        return {"input": self.input, "output": self.output}

    @property
    def shows_rows(self) -> bool:
        """As its adapter says; of a tied weight each module sees some rows only."""
        return self.adapter.rowwise and not self.tied

    def wants(self, side: str) -> bool:
        """Whether rows of one side are collected."""
        return self.factors[side].learns

    def collect(self, use: Use, x: Tensor, g: Tensor) -> int:
        """Rows of this call join what is pending, the same ones on both sides."""
        of_inputs, of_gradients = self.pending.of(use).moments
        adapter, module, sharing = kronecker_of(use), use.module, self.settings.weight_sharing
        rows = adapter.count(module, g, sharing)
        drawn, weight = self.draw(rows, g.device)
        if self.wants("output"):
            of_gradients.add(adapter.output_rows(module, x, g, sharing, drawn), weight, source=g)
        if not self.wants("input"):
            return rows
        by_rows = drawn is not None or of_inputs.wants_rows
        finished = None if by_rows else adapter.input_moment(module, x, self.bias, sharing)
        if finished is not None:
            largest = peak(x).to(statistics_dtype(x))
            of_inputs.add_finished(finished, largest.clamp_min(1.0) if self.bias else largest)  # a bias's input is one
            return rows
        if adapter.diagonal_input():
            drawn, weight = None, 1.0  # counting all is cheaper than drawing
        for part in adapter.input_rows(module, x, self.bias, sharing, drawn):
            of_inputs.add(part, weight, source=x)
        return rows

    def _requests(self, group: Group) -> list[tuple[Factor[Any], Request]]:
        """What a refresh asks of each factor."""
        rule, damping = self.settings.damping, group["damping"]
        sides = (("input", self.input, self.output), ("output", self.output, self.input))
        return [
            (own, self.settings.request(group, self.name, side, self.version, in_force, self._affordable))
            for side, own, other in sides
            for in_force in (rule.in_force(damping, own, other),)
        ]

    def _keeps_all(self, requests: Sequence[tuple[Factor[Any], Request]]) -> bool:
        """Whether both factors may be kept as they are."""
        return self._inverts and all(request.strategy.keeps_all(request) for _, request in requests)

    def asked(self, group: Group) -> list[tuple[Factor[Any], Request]]:
        """Eigenpairs; inverses of small factors cost less than sending them."""
        requests = self._requests(group)
        return [] if self._keeps_all(requests) else requests

    @property
    def ownable(self) -> tuple[str, ...]:
        """Wide ones; small factors are inverted everywhere, and those of groups are small."""
        wide = [side for side, f in self.factors.items() if type(f) is DenseFactor and len(f.shape) == 1]
        return () if self._inverts else tuple(wide)

    def decompose(self, group: Group, made: Sequence[Refreshed[Any]] | None = None) -> None:
        """Both factors; nothing changes if either fails."""
        finished = [self._adopted(one) for one in (self._made(group) if made is None else made)]
        for factor, refreshed in zip((self.input, self.output), finished, strict=True):
            factor.adopt(refreshed)

    def _made(self, group: Group) -> list[Refreshed[Any]]:
        """The factors as they are, where nothing else is wanted of them, or their eigenpairs."""
        requests = self._requests(group)
        if self._keeps_all(requests):
            intact = [made for own, request in requests if (made := own.intact(request)) is not None]
            if len(intact) == len(requests):
                return intact
        return [own.refresh(request) for own, request in requests]

    may_invert: ClassVar[bool] = True  # whether damped inverses of small factors can stand for their eigenpairs

    @property
    def _inverts(self) -> bool:
        """Whether the damped inverses of both factors are all that is wanted of them, and cheap enough to be applied."""
        d_G, d_A = self.output.shape[-1], self.input.shape[-1]
        wanted = self.may_invert and not self.settings.backward and self.settings.damping.inverts
        cheap = not self._wide and 2 * d_G * d_A * (d_G + d_A) <= INVERTED
        return wanted and at_once(self.weight) and cheap

    @property
    def _wide(self) -> bool:
        """Whether the decomposition of a factor costs more than whatever its rank costs a step."""
        return max(self.output.shape[-1], self.input.shape[-1]) >= WIDE

    def _adopted(self, refreshed: Refreshed[Any]) -> Refreshed[Any]:
        """What is used of a finished decomposition."""
        return refreshed

    @property
    def _affordable(self) -> int | None:
        """The largest automatic rank; None: any.

        Forward and backward cost 6 rows d_G d_A flops, and a preconditioner of rank r on both sides 8 r d_G d_A.
        """
        if self.weight.numel() <= SMALL_LAYER and not self._wide:
            return None
        return max(LEAST_AFFORDABLE, self.rows // ROWS_A_RANK)

    def _inverse(self, group: Group) -> Preconditioner:
        """The damped inverse, made once for a basis, a damping and a memory layout of the weight."""
        key = (self.version, float(group["damping"]), self.weight.device, self.weight.stride())
        if self._prepared is None or self._prepared[0] != key:
            low, columns = self.input.low, self.adapter.columns(self.module)
            if columns is not None:
                low = low.permuted(torch.cat([columns, columns.new_tensor([len(columns)])]) if self.bias else columns)
            self._prepared = (key, self._preconditioner(low, self.output.low, key[1]))
        return self._prepared[1]

    def _preconditioner(self, A: LowRank | Diagonal, G: LowRank, damping: float) -> Preconditioner:
        if isinstance(A, Intact) and isinstance(G, Intact) and at_once(G.matrix):
            of_A, of_G = (float(share) for share in self.settings.damping.shares(damping, self.input, self.output))
            with suppress(DecompositionError):  # a damping that was lowered since the refresh: their eigenpairs tell
                return inverses(A, G, of_A, of_G, lambda: self._multipliers(damping))
        return preconditioner(A, G, self._multipliers(damping))

    def _multipliers(self, damping: float) -> Multipliers:
        """What the damped inverse does to the four blocks of a gradient."""
        return self.settings.damping.multipliers(damping, self.input, self.output)

    def direction(
        self, gradients: tuple[Tensor, ...], group: Group, spend: bool = False, origin: Origin | None = None
    ) -> Direction:
        """The two-sided solve, unless that was done on the way."""
        with self.timed("apply"):
            self._follow()
            if self.rowwise is not None:
                return self._arrived(gradients, self.rowwise, self._seer(self.rowwise.projects, origin))
            inverse = self._inverse(group)
            seer = self._seer(inverse.projects, origin)
            matrix = partial(self.adapter.stored, self.module)
            j = self.adapter.vector(self.module, gradients[1]) if self.bias else None
            solution = inverse.solve(matrix(gradients[0]), j, matrix, spend, seer)
            parts: tuple[Part, ...] = (solution.weight,)
            if solution.bias is not None:
                parts = (solution.weight, Whole(solution.bias.reshape(gradients[1].shape)))
            return Direction(
                parts,
                solution.scale,
                sum(g.numel() for g in gradients),
                given=lambda: solution.given,
                length=root(solution.square),
                along=lambda: solution.inner() * solution.size,
            )

    def _seer(self, projects: bool, origin: Origin | None) -> Seer | None:
        """Who knows the projections of vectors of this origin, if anybody may."""
        self._follow_rows(projects)
        if self.follower is None:
            return None
        if origin is None:
            self.follower.unasked()
            return None
        return partial(self.follower.shadow, origin=origin)

    def _follow_rows(self, projects: bool) -> None:
        """Have the coming gradients' rows followed, where a basis asks for projections and rows are the cheaper way."""
        key = (self.version, self.weight.device)
        if self._followed == key:
            return
        self.follower, self._followed = None, key
        # Elsewhere than on a CPU nobody could look whether what was followed is true; beside other processes it is not.
        if not (projects and self.shows_rows and self.alone and at_once(self.weight)):
            return
        G, A = self.output.low, self.input.low
        if few(self.rows, G.dim, A.dim) and self.weight.dtype == G.U.dtype == A.U.dtype:
            self.follower = Follower(G, A, self.version)

    # --- natural gradients in the backward pass

    def pinned(self, group: Group) -> Rowwise | None:
        """Only where rows are cheaper than matrices and each side has digits enough."""
        if not self.settings.backward or not self.ready or self.retired or not self.weight.requires_grad:
            return None
        if self._in_backward is None:
            d_G, d_A = self.output.shape[-1], self.input.shape[-1]
            # Gradients of 16 bits have too few digits for their length before to be told from them; terms of the weight
            # itself in the loss do not come through the layer.
            fit = self.weight.dtype.itemsize > 2 and not self.penalised
            self._in_backward = fit and self.shows_rows and self.rows * (d_G + d_A) < 2 * d_G * d_A
        key = (self.version, float(group["damping"]), self.weight.device)
        if self._pinned is None or self._pinned[0] != key:
            self._pinned = (key, self._rowwise(key[1]) if self._in_backward else None)
        return self._pinned[1]

    def _rowwise(self, damping: float) -> Rowwise | None:
        self._follow()
        multipliers = self.settings.damping.multipliers(damping, self.input, self.output)
        made = Rowwise(self.output.low, self.input.low, multipliers)
        return made if made.precise else None

    def bring(self, before: Rowwise | None, after: Rowwise | None) -> None:
        """From the rows of this step's passes, where they are few and still what .grad is the sum of."""
        gradients = [p.grad for p in self.parameters]
        if before is not None and after is not None and self._remakes(gradients, before, after):
            W, *rest = (g for g in gradients if g is not None)
            if self.passed.remade(W, rest[0] if rest else None, before, after):
                return
        self.carry(gradients, before, after)

    def _remakes(self, gradients: Sequence[Tensor | None], before: Rowwise, after: Rowwise) -> bool:
        """Whether that would save something, and somebody can look."""
        alike = all(g is not None and g.dtype == before.dtype == after.dtype for g in gradients)
        return alike and self.alone and at_once(self.weight) and self.passed.cheaper(before, after)

    def carry(self, tensors: Sequence[Tensor | None], before: Rowwise | None, after: Rowwise | None) -> None:
        """All parameters together, as columns of one matrix."""
        known = before or after
        if known is None or all(t is None for t in tensors):
            return
        dtype = torch.promote_types(known.dtype, after.dtype) if after is not None else known.dtype
        # What is in another precision, or is not there, has a stand-in.
        parts = [
            torch.zeros_like(p, dtype=dtype) if t is None else t.to(dtype)
            for p, t in zip(self.parameters, tensors, strict=True)
        ]
        W, b = parts[0], parts[1] if len(parts) > 1 else None
        if after is None:
            known.undo_(W, b)
        else:
            after.carry_(W, b, before)
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor is not None and tensor is not part:
                tensor.copy_(part)

    def _arrived(self, gradients: tuple[Tensor, ...], rowwise: Rowwise, seer: Seer | None) -> Direction:
        """The gradients are the direction; their length before is asked for where a step shall have it."""
        vectors, length = [g.to(rowwise.dtype) for g in gradients], _length(gradients)
        true: Number = 1.0
        if isinstance(length, Tensor) or not SAFE[0] < length < SAFE[1]:
            true, seer = number(unit_of(gradients)), None
            vectors = [(g / true).to(rowwise.dtype) for g in gradients]
            length = _length(vectors)
        bias = vectors[1] if len(vectors) > 1 else None
        known = cache(lambda: rowwise.projections(vectors[0], bias, length * length, seer))
        return Direction(
            tuple(Itself() for _ in gradients),
            rowwise.scale,
            sum(g.numel() for g in gradients),
            given=lambda: root(rowwise.before(known())) * true,
            length=length * true,
            along=lambda: rowwise.inner(known()) * true * true,
        )

    def state_dict(self) -> dict[str, Any]:
        """Also the damping that the coming gradients are preconditioned with: momentum is in its coordinates."""
        damping = None if self._pinned is None or self.rowwise is None else self._pinned[0][1]
        follower = None if self.follower is None else self.follower.state_dict()
        return {**super().state_dict(), "in_backward": self._in_backward, "pinned": damping, "follower": follower}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        super().load_state_dict(state)
        chosen, damping = state["in_backward"], state["pinned"]
        if chosen not in (None, True, False) or not (damping is None or (isinstance(damping, float) and chosen)):
            raise ValueError(f"the saved state preconditions gradients with a damping of {damping!r}")
        self._in_backward = chosen
        if damping is not None:
            self.rowwise = self.pinned({"damping": damping})
        if self.ready:  # what was decided when the basis was new
            self._followed = (self.version, self.weight.device)
        if state["follower"] is not None and at_once(self.weight):
            self.follower = Follower(self.output.low, self.input.low, self.version)
            self.follower.load_state_dict(state["follower"])

    def multiply(self, change: tuple[Tensor, ...], group: Group) -> tuple[Tensor, ...]:
        """(G + l) D (A + l) for the factored rules, G D A + l D for the product rule."""
        self._follow()
        return self.adapter.parted(self.module, self._curved(self._joined(change), group["damping"]), change)

    def _joined(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """One tensor a parameter as a matrix, the bias being its last column."""
        return self.adapter.joined(self.module, tensors, statistics_dtype(self.weight))

    def _curved(self, D: Tensor, damping: float) -> Tensor:
        """The damped curvature times a matrix."""
        return self.settings.damping.multiply(D, damping, self.input, self.output)

    def facts(self, group: Group) -> dict[str, Any]:
        """Sizes, ranks, captured trace, dampings."""
        facts: dict[str, Any] = {}
        for side, factor in self.factors.items():
            captured = factor.captured if factor.rank is not None else None
            facts[f"{side}_dim"] = factor.shape[-1]
            facts[f"kept_{side}"] = factor.kind
            facts[f"rank_{side}"] = factor.rank
            facts[f"captured_{side}"] = None if captured is None else float(captured)
        if self.ready:
            shares = self.settings.damping.shares(group["damping"], self.input, self.output)
            facts["damping_input"], facts["damping_output"] = (float(share.mean()) for share in shares)
            facts |= self._visible(group)
        return facts

    def _visible(self, group: Group) -> dict[str, float]:
        """Beside the damping of each side: the largest mode, and how much too far a step may go along one that was cut off.

        None of those is larger than the smallest one kept, nor than all that was cut off.
        """
        found: dict[str, float] = {}
        damping = self.settings.damping.beside(group["damping"], self.input, self.output)
        for (side, factor), l in zip(self.factors.items(), damping, strict=True):
            if factor.learns:
                found[f"largest_{side}"] = float((factor.low.largest / l).amax())
                if not factor.low.full:
                    low, d = factor.low, factor.shape[-1]
                    most = torch.minimum(low.s[..., -1], (d * factor.mean - low.s.sum(-1)).clamp_min(0))
                    ratio = (most + l) / (low.fill + l)
                    found[f"cut_{side}"] = float(ratio.amax() ** -self.settings.damping.power)
        return found


def kronecker_of(use: Use) -> KroneckerAdapter:
    """Its adapter, known to be of this kind."""
    assert isinstance(use.adapter, KroneckerAdapter)  # or another block would serve it
    return use.adapter


def _length(tensors: Sequence[Tensor]) -> Number:
    """Of all of them together."""
    return number(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t).double() for t in tensors])))

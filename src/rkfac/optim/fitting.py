"""Curvature without training: the factors of a model as it stands, averaged over batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rkfac.curvature.block import Block, FittedBlock, FittedEigen, FittedTied, FittedUnits, Settings
from rkfac.curvature.capture import Capture
from rkfac.curvature.fisher import Likelihood
from rkfac.curvature.hooks import full_precision
from rkfac.curvature.sampled import SampledCapture
from rkfac.layers import Adapter, KroneckerAdapter, TiedAdapter, Uncovered, UnitAdapter, Use
from rkfac.operators import Curvature, why_not
from rkfac.optim.collecting import commit
from rkfac.optim.compiled import run_eagerly
from rkfac.optim.coverage import Choice, block_for, cover
from rkfac.optim.gate import Gate
from rkfac.optim.report_text import listed
from rkfac.optim.snapshot import curvature_of
from rkfac.optim.terms import Terms, counted
from rkfac.optim.untouched import untouched

Kinds = Mapping[type, Callable[..., Block]]
BLOCKS: Kinds = {
    KroneckerAdapter: FittedBlock,
    TiedAdapter: FittedTied,
    UnitAdapter: FittedUnits,
}
WITH_MOMENTS: Kinds = {**BLOCKS, KroneckerAdapter: FittedEigen}
Loss = Callable[[Any, Any], Tensor]


class Enumerated(Likelihood):
    """In the place of draws: the columns that the exact Fisher is the sum of, one a pass; the mean over passes is exact."""

    def __init__(self, inner: Likelihood) -> None:
        self.inner = inner
        self.at = 0
        self.total = 1

    def terms(self, output: Tensor) -> int:
        """As drawn."""
        return self.inner.terms(output)

    def draw_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """The column whose turn it is."""
        self.total = self.inner.columns(output)
        return math.sqrt(self.total) * self.inner.column(output, self.at)


class Fitting:
    """Blocks of a model, and what they have seen."""

    def __init__(self, model: nn.Module, choice: Choice, settings: Settings, group: dict[str, Any]) -> None:
        self.model, self.settings, self.group = model, settings, group
        self.gate = Gate(1)
        kinds = BLOCKS if settings.method is None else WITH_MOMENTS

        def make(uses: Sequence[Use], adapter: Adapter) -> Block | Uncovered:
            made = block_for(uses, adapter, kinds, settings, "fit_curvature")
            why = choice.too_wide(made.widest(group)) if isinstance(made, Block) else ""
            return Uncovered(why) if why else made

        found = cover(model, choice, make, list(model.parameters()), {})
        self.blocks = {name: found.blocks[name] for name in found.order if name in found.blocks}
        self.reasons = found.reasons
        if not self.blocks:
            self._refuse({name: left.reason for name, left in found.reasons.items()})
        # Samples; a pass that is one of several for them counts its share.
        self.seen = dict.fromkeys(self.blocks, 0.0)
        self._share = 1.0

        keeping = [name for name, block in self.blocks.items() if isinstance(block, FittedTied)]
        if keeping and settings.method is not None:
            warnings.warn(
                f"eigenvalues='moments' does not go with a table that is also the head: {listed(keeping)} keeps products of "
                "eigenvalues",
                stacklevel=4,
            )

    @staticmethod
    def _refuse(reasons: Mapping[str, str]) -> NoReturn:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:3])
        raise ValueError(f"no layer of the model has a curvature: {why or 'it has none'}")

    def take(self, capture: Capture, passes: int) -> None:
        """What came in with one backward pass, which is one of so many for its batch."""
        capture.check()
        blocks = self.blocks.values()
        waiting = [block for block in blocks if not block.pending.empty and not capture.foreign(block)]
        self._share = 1 / passes
        commit(waiting, self._weighed, None, self.gate)
        for p in self.model.parameters():
            p.grad = None
        capture.forget()
        for block in blocks:
            block.discard()

    def _weighed(self, block: Block) -> dict[str, Any]:
        """With a decay that makes the average one over samples."""
        new = self._share * block.pending.samples(self.settings.loss_average)
        self.seen[block.name] += new
        return {**self.group, "factor_decay": 1 - new / self.seen[block.name]}

    def decompose(self, capture: Capture) -> None:
        """Eigenpairs of all that was seen."""
        for block in self.blocks.values():
            block.retired = capture.foreign(block) or block.trouble
            if block.observed and not block.retired:
                block.decompose(self.group)

    def begin_again(self) -> bool:
        """Whether some layers want to see everything once more, now that they have bases."""
        for name, block in self.blocks.items():
            block.wanted = isinstance(block, FittedEigen) and block.ready
            self.seen[name] = 0.0 if block.wanted else self.seen[name]
        return any(block.wanted for block in self.blocks.values())

    def result(self) -> Curvature:
        """All that was found."""
        damping = float(self.group["damping"])
        found = curvature_of(
            self.model, self.blocks, self.reasons, lambda block: damping, lambda block: round(self.seen[block.name])
        )
        if not found:
            self._refuse({name: why_not(block) for name, block in self.blocks.items()})
        return found


def fitted(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    choice: Choice,
    settings: Settings,
    group: dict[str, Any],
    meaning: Likelihood | None,
    draws: int,
    terms: Terms | None,
) -> Curvature:
    """The curvature of a model; `meaning`: what drawn (or enumerated) targets come from, None for the loss's own.

    `terms`: what says how many terms the loss of a batch is the mean of, None: the layers.
    """
    with untouched(model):
        fitting = Fitting(model, choice, settings, group)
        if meaning is None:
            capture = Capture(model)
        else:
            capture = SampledCapture(model, meaning, settings.randomness)
        capture.otherwise = "has no curvature"
        enumerated = meaning if isinstance(meaning, Enumerated) else None
        try:
            run_eagerly(model, capture)
            for block in fitting.blocks.values():
                capture.attach(block)
            _pass_over(model, batches, loss, fitting, capture, draws, enumerated, terms)
            fitting.decompose(capture)
            if fitting.begin_again():
                _pass_over(model, batches, loss, fitting, capture, draws, enumerated, terms)
        finally:
            capture.close()
        return fitting.result()


def _pass_over(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Loss,
    fitting: Fitting,
    capture: Capture,
    draws: int,
    enumerated: Enumerated | None,
    terms: Terms | None,
) -> None:
    """Every batch, once or as often as its Fisher has draws or columns."""
    count = 0
    for count, batch in enumerate(batches, 1):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(f"batches must be pairs (inputs, targets), batch {count} is a {type(batch).__name__}")
        capture.terms = None if terms is None else counted(terms, *batch)
        at, passes = 0, draws
        while at < passes:
            if enumerated is not None:
                enumerated.at = at
            _run(model, *batch, loss)
            passes = draws if enumerated is None else enumerated.total
            before = {name: block.updates for name, block in fitting.blocks.items()}
            pending = [name for name, block in fitting.blocks.items() if not block.pending.empty]
            devices = {p.device for p in model.parameters()}
            with full_precision(devices), torch.no_grad():
                fitting.take(capture, passes)
            spoilt = [
                n for n in pending if fitting.blocks[n].updates == before[n] and not capture.foreign(fitting.blocks[n])
            ]
            if spoilt:
                raise ValueError(f"batch {count} has activations or gradients that are not finite, in {listed(spoilt)}")
            at += 1
    if not count:
        raise ValueError("there are no batches: a generator that was used up, or an empty list")


def _run(model: nn.Module, inputs: Any, targets: Any, loss: Loss) -> None:
    """One forward and backward pass."""
    with torch.enable_grad():
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        value = loss(output, targets)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(
                "loss must return one number, the mean over the batch (or its sum, with loss_average='sum')"
            )
        value.backward()

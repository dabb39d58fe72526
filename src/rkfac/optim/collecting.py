"""What a statistics step does before it refreshes: who is still to be trusted, who was not seen, what enters the averages."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rkfac.curvature.block import Block
from rkfac.curvature.capture import Capture
from rkfac.optim.gate import Gate
from rkfac.optim.report import REPLACED
from rkfac.optim.report_text import listed

GroupOf = Callable[[Block], dict[str, Any]]
PATIENCE = 50  # steps at most until a layer that never was seen is named
CALLER = 5  # frames from here to the line that called optimizer.step()


def retire(blocks: Collection[Block], capture: Capture, owners_now: Callable[[], Counter[int]], look: bool) -> None:
    """Leave layers alone whose statistics cannot describe their weight any more.

    `owners_now` counts the modules of each parameter. `look`: on steps that collect statistics, for looking through a whole
    model is not worth it more often, unless something is known to have changed.
    """
    owners = owners_now() if look else None
    for block in blocks:
        foreign = capture.foreign(block)
        tied = "its weight was tied to another module's after the optimizer was built"
        more = owners is not None and owners[id(block.weight)] > len(block.uses)
        why = block.trouble or foreign or (tied if more else "")
        if why and not block.retired:
            block.retired, block.follower = why, None
            block.discard()
            if not foreign:  # that was said when it was found
                owners = owners_now() if owners is None else owners
                what = "trains by the fallback rule" if owners[id(block.weight)] else "is not preconditioned"
                why = why if owners[id(block.weight)] else REPLACED
                warnings.warn(f"layer {block.name!r} {what} from now on: {why}", stacklevel=CALLER)


def notice_unseen(blocks: Collection[Block], seen: Callable[[Block], bool], group_of: GroupOf) -> None:
    """Say loudly when layers get gradients and no call of theirs ever comes by."""
    unseen = []
    for block in blocks:
        if not block.wanted or block.retired or block.weight.grad is None:
            continue
        block.missed = 0 if seen(block) else block.missed + 1
        if block.missed == (2 if block.observed else min(PATIENCE, group_of(block)[block.period])):
            unseen.append(block.name)
    if unseen:
        warnings.warn(
            f"{listed(unseen)} got gradients, but no call of theirs was seen: they train by the fallback rule. Either a "
            "graph was compiled before the optimizer was built (hand the compiled model to the optimizer, or compile "
            "after building it), or another object than the model given to the optimizer is being trained, or an attention "
            "layer multiplies by its weights in a way that is not known here.",
            stacklevel=CALLER,
        )


def begin(blocks: Collection[Block]) -> None:
    """A step begins: what belonged to another one, or to a gradient that was dropped, is over."""
    for block in blocks:
        block.begin()
        if block.weight.grad is None and not block.pending.empty:
            block.discard()


def commit(
    blocks: Collection[Block],
    group_of: GroupOf,
    scale: Tensor | None,
    gate: Gate,
    processes: int = 1,
    spoilt: Sequence[str] = (),
) -> None:
    """Pending statistics enter the averages, unless they hold NaN or Inf. One synchronisation a statistics step.

    `processes`: over how many the gradients were averaged; `spoilt`: what was left out in all of them already.
    """
    refused = list(spoilt)
    waiting = [block for block in blocks if not block.pending.empty]
    if not waiting:
        _warn_of_refused(refused)
        return
    readings = [block.pending.readings() for block in waiting]
    device, refusals = readings[0][0].device, gate.readings()
    scales = [] if scale is None else [scale.double().reshape(())]
    asked = [t.to(device) for t in chain(scales, refusals, *readings)]
    numbers = iter(torch.stack(asked).tolist())
    factor = (next(numbers) if scales else 1.0) * processes
    gate.settle([next(numbers) for _ in refusals])
    gate.report()
    for block, own in zip(waiting, readings, strict=True):
        if not block.commit(group_of(block), [next(numbers) for _ in own], factor):
            refused.append(block.name)
    _warn_of_refused(refused)


def _warn_of_refused(names: Sequence[str]) -> None:
    if names:
        warnings.warn(f"statistics with NaN or Inf were left out for {listed(names)}", stacklevel=CALLER + 1)

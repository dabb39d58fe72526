"""Something that is not finite, put into one layer at one stage of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import rkfac
from rkfac.optim import clip as clips

if TYPE_CHECKING:
    from rkfac.curvature.block import Block

TARGET = "hidden"  # a Linear in the middle of optim.problems.Reader
Patch = pytest.MonkeyPatch


def block_of(optimizer: rkfac.KFAC, name: str = TARGET) -> Block:
    return optimizer._blocks[name]


def _spoiled(t: Tensor, value: float = math.nan) -> Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    t.view(-1)[0] = value
    return t


def _rows(side: str) -> Callable[[Patch, rkfac.KFAC], None]:
    def inject(patch: Patch, optimizer: rkfac.KFAC) -> None:
        module, kind = block_of(optimizer).module, type(block_of(optimizer).adapter)
        genuine = getattr(kind, f"{side}_rows")

        def rows(self: Any, layer: Any, *rest: Any) -> Any:
            made = genuine(self, layer, *rest)
            if layer is not module:
                return made
            return _spoiled(made) if isinstance(made, Tensor) else [_spoiled(part) for part in made]

        patch.setattr(kind, f"{side}_rows", rows)

    return inject


def _moments(patch: Patch, optimizer: rkfac.KFAC) -> None:
    """The rows were finite, what was made of them is not."""
    block = block_of(optimizer)
    genuine = block.observe

    def observe(*args: Any) -> None:
        genuine(*args)
        for moment in block.pending.moments:
            for part in moment._parts:
                for name, value in vars(part).items():
                    if name in ("rows", "values"):
                        setattr(part, name, _spoiled(value))
                    elif name == "strips":
                        part.strips = [_spoiled(strip) for strip in value]

    patch.setattr(block, "observe", observe)


def _solver(*names: str) -> Callable[[Patch, rkfac.KFAC], None]:
    """LAPACK answers with NaN vectors while the target is decomposed, in every precision."""

    def inject(patch: Patch, optimizer: rkfac.KFAC) -> None:
        block = block_of(optimizer)
        decompose, inside = block.decompose, []

        def guarded(*args: Any) -> None:
            inside.append(True)
            try:
                decompose(*args)
            finally:
                inside.clear()

        patch.setattr(block, "decompose", guarded)
        for name in names:
            genuine = getattr(torch.linalg, name)

            def broken(*args: Any, genuine: Any = genuine, **keywords: Any) -> Any:
                out = genuine(*args, **keywords)
                return [_spoiled(t) if t.ndim > 1 else t for t in out] if inside else out

            patch.setattr(torch.linalg, name, broken)

    return inject


def _direction(where: str, value: float) -> Callable[[Patch, rkfac.KFAC], None]:
    def inject(patch: Patch, optimizer: rkfac.KFAC) -> None:
        block = block_of(optimizer)
        genuine = block.direction

        def direction(*args: Any) -> Any:
            made = genuine(*args)
            if where == "scale":
                return replace(made, scale=made.scale * 0 + value)
            spoiled = replace(made.parts[1], tensor=_spoiled(made.parts[1].tensor, value))
            return replace(made, parts=(made.parts[0], spoiled), length=made.length * 0 + abs(value))

        patch.setattr(block, "direction", direction)

    return inject


def _clip(value: float) -> Callable[[Patch, rkfac.KFAC], None]:
    def inject(patch: Patch, optimizer: rkfac.KFAC) -> None:
        size, genuine = sum(p.numel() for p in block_of(optimizer).parameters), clips.rms_clip

        def rms_clip(norm: Tensor, entries: int, largest: float | None) -> Tensor | None:
            clip = genuine(norm, entries, largest)
            return clip if clip is None or entries != size else clip * 0 + value

        patch.setattr(clips, "rms_clip", rms_clip)

    return inject


# What makes a statistic bad, what makes a basis bad, and what makes an update bad.
STATISTICS = {"rows a": _rows("input"), "rows g": _rows("output"), "moments": _moments}
SOLVERS = {
    "every solver": _solver("svd", "eigh", "qr", "cholesky_ex"),
    "svd": _solver("svd"),
    "eigh": _solver("eigh"),
    "qr": _solver("qr"),
    "cholesky": _solver("cholesky_ex"),
}
UPDATES = {
    "direction nan": _direction("parts", math.nan),
    "direction inf": _direction("parts", -math.inf),
    "scale inf": _direction("scale", math.inf),
    "clip nan": _clip(math.nan),
    "clip inf": _clip(math.inf),
}


@contextmanager
def injected(inject: Callable[[Patch, rkfac.KFAC], None], optimizer: rkfac.KFAC) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, optimizer)
        yield


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)


def assert_finite(model: torch.nn.Module, optimizer: rkfac.KFAC) -> None:
    for name, p in model.named_parameters():
        assert p.isfinite().all(), f"{name} is not finite"
    for t in tensors(optimizer.state_dict()):
        assert t.isfinite().all(), "a buffer, an average or a basis is not finite"

"""What an optimizer keeps between steps, in bytes, and how large a checkpoint of it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rkfac import LayerReport


def layers(optimizer: Optimizer) -> list[LayerReport]:
    """What an optimizer tells of its layers: nothing, if it has no curvature."""
    tell: Callable[[], list[LayerReport]] = getattr(optimizer, "report", list)
    return tell()


def held(optimizer: Optimizer) -> dict[str, int]:
    """Bytes by kind: buffers of the rule (momentum, moments, a peer's matrices), factors, decompositions."""
    report = layers(optimizer)
    return {
        "buffers": nbytes(tensors(dict(optimizer.state))),
        "factors": sum(layer.bytes.get("factors", 0) for layer in report),
        "bases": sum(layer.bytes.get("basis", 0) for layer in report),
    }


def checkpoint_size(optimizer: Optimizer) -> int:
    """Bytes that torch.save of the state would write."""
    sink = _Counter()
    torch.save(optimizer.state_dict(), sink)  # type: ignore[arg-type]  # all it needs is `write`
    return sink.count


class _Counter:
    """A file that keeps nothing."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, data: bytes) -> int:
        self.count += len(data)
        return len(data)

    def flush(self) -> None:
        """There is nothing to flush."""


def nbytes(found: Iterable[Tensor]) -> int:
    """Of storages, each counted once."""
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in found)}.values())


@singledispatch
def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    return iter(())


@tensors.register
def _(value: Tensor) -> Iterator[Tensor]:
    yield value


@tensors.register(dict)
def _(value: Mapping[Any, Any]) -> Iterator[Tensor]:
    for inner in value.values():
        yield from tensors(inner)


@tensors.register(list)
@tensors.register(tuple)
def _(value: Iterable[Any]) -> Iterator[Tensor]:
    for inner in value:
        yield from tensors(inner)

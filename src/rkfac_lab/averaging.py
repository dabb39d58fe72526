"""What several processes do in one step: the gradient of the whole batch, the first one's buffers, random numbers of each one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .ranks import Ranks


def average_gradients(model: nn.Module, together: Ranks) -> None:
    """Let every gradient be its mean over the processes; a parameter that has one nowhere keeps none.

    After the backward pass and in one message a precision: a process without samples takes part with zeros, which
    DistributedDataParallel's hooks inside of the backward pass could not let it do.
    """
    if together.alone:
        return
    for some in _alike(p for p in model.parameters() if p.requires_grad):
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
        there = torch.tensor([float(p.grad is not None) for p in some], dtype=some[0].dtype, device=some[0].device)
        flat = torch.cat([*(part.reshape(-1) for part in parts), there])
        together.add_up(flat, "gradients")
        sums = flat.div_(together.size).split([*(p.numel() for p in some), len(some)])
        for p, part, own, anywhere in zip(some, parts, sums, sums[-1].tolist(), strict=False):
            if anywhere > 0:
                part.copy_(own.view(p.shape))
                p.grad = part


def same_start(model: nn.Module, together: Ranks) -> None:
    """Parameters and buffers of the first process for everybody."""
    _follow([*model.parameters(), *model.buffers()], together, "parameters")


def same_buffers(model: nn.Module, together: Ranks) -> None:
    """Buffers of the first process for everybody, such as the running averages of BatchNorm."""
    _follow(model.buffers(), together, "buffers")


@torch.no_grad()
def _follow(tensors: Iterable[Tensor], together: Ranks, what: str) -> None:
    if together.alone:
        return
    for some in _alike(tensors):
        flat = torch.cat([t.reshape(-1) for t in some])
        together.follow_first(flat, what)
        for t, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
            t.copy_(part.view(t.shape))


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """In parts of one precision and device each."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


@contextlib.contextmanager
def own_randomness(together: Ranks, device: torch.device, seed: int, step: int) -> Iterator[None]:
    """Inside, random numbers are this process's own and the same in every repetition of the step; outside, everybody's.

    With the same dropout on every share a batch would be more alike than it is. Optimizers must draw the same everywhere.
    """
    if together.alone:
        yield
        return
    number = hashlib.blake2b(repr((seed, step, together.rank)).encode(), digest_size=7).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(number))
        yield

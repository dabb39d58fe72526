"""What the processes of a crew do: train a model together, and beside it the whole batch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from optim.enrolled import MEMBERS
from optim.problems import Batch, convnet, images, mlp, parameters, reader, rows, sentences, speaker

PERIODS: dict[str, Any] = {"lr": 0.05, "factor_every": 2, "inverse_every": 3}
STEPS = 20


class _Chooser(nn.Module):
    """Half of the samples go one way, half the other: a process may have none for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        goes_left = x[:, 0] > 0
        y = h.new_zeros(len(x), 4)
        if goes_left.any():
            y = y.index_put((goes_left,), self.left(h[goes_left]))
        if (~goes_left).any():
            y = y.index_put((~goes_left,), self.right(h[~goes_left]))
        return y


def chooser() -> nn.Module:
    return _Chooser().double()


def frozen_convnet() -> nn.Module:
    """Statistics of a BatchNorm's batch belong to one process, in torch too: they are not part of the comparison."""
    model = convnet()
    model[1].eval()
    return model


def wide() -> nn.Module:
    """Layers too wide to be inverted as they are."""
    layers = nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 310), nn.Tanh(), nn.Linear(310, 4)
    return nn.Sequential(*layers).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mlp": (mlp, rows),
    "convnet": (frozen_convnet, images),
    "reader": (reader, sentences),
    "speaker": (speaker, sentences),
    "chooser": (chooser, rows),
    "wide": (wide, rows),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]()


def batches(name: str, count: int, size: int, sort: bool = False) -> list[Batch]:
    torch.manual_seed(4)
    found = [MODELS[name][1](size) for _ in range(count)]
    if sort:  # so that who is first has samples of one kind alone
        found = [(x[order], y[order]) for x, y in found for order in (x[:, 0].argsort(),)]
    return found


def made(optimizer: str, model: nn.Module, **keywords: Any) -> torch.optim.Optimizer:
    record = MEMBERS[optimizer]
    chosen = {**PERIODS, **({"lr": 1e-3} if optimizer.startswith("KLDWRM") else {}), **keywords}
    return record(model, **chosen)


def share(batch: Batch, rank: int, cuts: list[int]) -> Batch:
    return batch[0][cuts[rank] : cuts[rank + 1]], batch[1][cuts[rank] : cuts[rank + 1]]


def even(size: int, parts: int) -> list[int]:
    return [size * i // parts for i in range(parts + 1)]


def averaged(model: nn.Module) -> None:
    """What DistributedDataParallel does, by hand; a layer without samples here has a gradient of zero."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        distributed.all_reduce(p.grad)
        p.grad /= distributed.get_world_size()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in parameters(model).values()])


def of_the_first(values: Tensor) -> Tensor:
    """What the first process has."""
    distributed.broadcast(values, 0)
    return values


def same_everywhere(values: Tensor) -> bool:
    found = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, values)
    return all(torch.equal(one, values) for one in found)


def compared(
    optimizer: str,
    model: str,
    wrapping: str = "before",
    size: int = 12,
    cuts: list[int] | None = None,
    passes: int = 1,
    sort: bool = False,
    ddp: dict[str, Any] | None = None,
    keywords: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> tuple[float, float, bool]:
    """Largest difference to one process with all samples, how far that one moved, whether all processes are equal.

    `wrapping`: "before" or "after" the optimizer is built, or "none". A process is what a pass of accumulation with
    loss / processes is: with `cuts` of different lengths that is what a process alone is shown.
    """
    keywords, rank, processes = keywords or {}, distributed.get_rank(), distributed.get_world_size()
    cuts = cuts or even(size, processes)
    ddp = dict(ddp or {})
    every_pass = ddp.pop("sync every pass", False)
    data = batches(model, steps * passes, size, sort)
    alone, together = build(model), build(model)
    start = flat(alone)
    reference = made(optimizer, alone, process_group=False, **keywords)
    for i in range(steps if rank == 0 else 0):  # once is enough, and the others wait
        reference.zero_grad()
        for batch in data[i * passes : (i + 1) * passes]:
            if len({b - a for a, b in pairwise(cuts)}) == 1:
                (F.cross_entropy(alone(batch[0]), batch[1]) / passes).backward()
            else:
                for r in range(processes):
                    x, y = share(batch, r, cuts)
                    (F.cross_entropy(alone(x), y) / processes / passes).backward()
        reference.step()
    net = DistributedDataParallel(together, **(ddp or {})) if wrapping == "before" else together
    own = made(optimizer, net, **keywords)
    net = DistributedDataParallel(together, **(ddp or {})) if wrapping == "after" else net
    for i in range(steps):
        own.zero_grad()
        for number, batch in enumerate(data[i * passes : (i + 1) * passes]):
            x, y = share(batch, rank, cuts)
            quiet = isinstance(net, DistributedDataParallel) and number < passes - 1 and not every_pass
            with net.no_sync() if quiet else nullcontext():
                (F.cross_entropy(net(x), y) / passes).backward()
        if wrapping == "none":
            averaged(together)
        own.step()
    end = of_the_first(flat(alone))
    difference = float((flat(together) - end).abs().max())
    return difference, float((end - start).abs().max()), same_everywhere(flat(together))


def steps_of(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], cuts: list[int]) -> Iterator[None]:
    """Ordinary steps on this process's share."""
    for batch in data:
        x, y = share(batch, distributed.get_rank(), cuts)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        yield

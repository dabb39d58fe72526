"""What the processes of a crew do with a model that fully_shard has cut into rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from distributed.together import STEPS, batches, build, even, flat, made, same_everywhere, share
from optim.problems import Batch, parameters


def cut(model: nn.Module, each: bool = True, **options: Any) -> nn.Module:
    """As its users do: every layer with children or parameters of its own kind, then the whole."""
    if each:
        for module in model.children():
            if any(True for _ in module.parameters()):
                fully_shard(module, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().flatten() for p in parameters(model).values()])


def loss_of(net: nn.Module, batch: Batch, cuts: list[int]) -> Tensor:
    x, y = share(batch, distributed.get_rank(), cuts)
    return F.cross_entropy(net(x), y)


def compared(
    optimizer: str,
    model: str,
    size: int = 12,
    passes: int = 1,
    each: bool = True,
    keywords: dict[str, Any] | None = None,
    steps: int = STEPS,
    options: dict[str, Any] | None = None,
) -> tuple[float, float, bool]:
    """Largest difference to one process with all samples, how far that one moved, whether all processes are equal."""
    keywords = keywords or {}
    cuts = even(size, distributed.get_world_size())
    data = batches(model, steps * passes, size)
    alone, net = build(model), cut(build(model), each, **(options or {}))
    start = flat(alone)
    alone_keywords = {**keywords, "process_group": False}
    alone_keywords.pop("memory", None)
    reference, own = made(optimizer, alone, **alone_keywords), made(optimizer, net, **keywords)
    for i in range(steps):
        reference.zero_grad()
        own.zero_grad()
        for number, batch in enumerate(data[i * passes : (i + 1) * passes]):
            (F.cross_entropy(alone(batch[0]), batch[1]) / passes).backward()
            net.set_requires_gradient_sync(number == passes - 1)
            (loss_of(net, batch, cuts) / passes).backward()
        reference.step()
        own.step()
    found = whole(net)
    return float((found - flat(alone)).abs().max()), float((flat(alone) - start).abs().max()), same_everywhere(found)

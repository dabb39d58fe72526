"""Steps that a gradient scaler takes, and skips, with several processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from distributed.together import batches, build, even, flat, made, same_everywhere, share

STEPS, SIZE, SPOILT = 8, 12, (2, 5)


def compared(optimizer: str) -> tuple[float, float, bool]:
    """As `together.compared`; at some steps one process has a loss that is not finite, and the process alone has no such step."""
    rank, cuts = distributed.get_rank(), even(SIZE, distributed.get_world_size())
    data = batches("mlp", STEPS, SIZE)
    alone, together = build("mlp"), build("mlp")
    start = flat(alone)
    reference = made(optimizer, alone, process_group=False)
    for number, (x, y) in enumerate(data):
        if number not in SPOILT:
            reference.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
            reference.step()
    net = DistributedDataParallel(together)
    own, scaler = made(optimizer, net), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, batch in enumerate(data):
        x, y = share(batch, rank, cuts)
        own.zero_grad()
        factor = float("inf") if number in SPOILT and rank == 0 else 1.0
        scaler.scale(F.cross_entropy(net(x), y) * factor).backward()
        scaler.unscale_(own)
        torch.nn.utils.clip_grad_norm_(together.parameters(), 0.3)
        scaler.step(own)
        scaler.update()
    difference = float((flat(together) - flat(alone)).abs().max())
    return difference, float((flat(alone) - start).abs().max()), same_everywhere(flat(together))

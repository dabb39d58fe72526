"""DistributedDataParallel: the same steps from several processes. `torchrun --nproc-per-node 2 examples/with_ddp.py [FOLDER]`"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import rkfac
from digits import BATCH, accuracy, decay, loader, network


def train(folder: Path, epochs: int) -> tuple[nn.Module, rkfac.RSKFAC]:
    """Train, from the checkpoint in the folder on if there is one."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    data = loader().dataset
    mine = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    done, file = 0, folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["epochs"]
    for _ in range(done, epochs):
        for x, y in DataLoader(data, BATCH // size, sampler=mine):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    if rank == 0:
        states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "scheduler": scheduler.state_dict(), "epochs": epochs}, file)
    distributed.barrier()
    return model.module, optimizer


if __name__ == "__main__":
    distributed.init_process_group("gloo")  # "nccl" on GPUs
    place = [sys.argv[1] if len(sys.argv) > 1 else mkdtemp() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(place)
    train(Path(place[0]), epochs=2)
    model, optimizer = train(Path(place[0]), epochs=7)  # goes on where the first one ended
    if distributed.get_rank() == 0:
        print(optimizer.report())
        print(f"{distributed.get_world_size()} processes: {accuracy(model):.1%} of the test images are recognised")
    distributed.destroy_process_group()

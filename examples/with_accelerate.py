"""Accelerate: prepare everything as ever. `python examples/with_accelerate.py`, or `accelerate launch` for several processes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import rkfac
from digits import accuracy, decay, loader, network


def train(folder: Path, epochs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train, from Accelerate's checkpoint in the folder on if there is one."""
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    model, prepared, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    done = max((int(saved.name) for saved in folder.iterdir()), default=0)
    if done:
        accelerator.load_state(str(folder / str(done)))
    for _ in range(done, epochs):
        for x, y in batches:
            prepared.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            prepared.step()
        scheduler.step()
    accelerator.save_state(str(folder / str(epochs)))
    return accelerator.unwrap_model(model), prepared


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(Path(folder), epochs=2)
        model, prepared = train(Path(folder), epochs=7)  # goes on where the first one ended
    # Accelerate's wrapper knows what torch's optimizers have; rkfac.unwrap finds what it hides.
    print(rkfac.unwrap(prepared).report())
    print(f"Accelerate: {accuracy(model):.1%} of the test images are recognised")

"""A training script with Accelerate: `accelerate launch with_accelerate.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

import rkfac
from distributed.task import ACCUMULATED, CLIP, HALF, PROCESSES, SIZE, chosen, dataset, keep, scheduled
from distributed.together import build


def train(folder: Path, name: str, passes: int = 1, resume: bool = False) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
    model = build("reader")
    optimizer = chosen(model)
    scheduler = scheduled(optimizer)
    loader = DataLoader(dataset(), batch_size=SIZE // PROCESSES)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        accelerator.load_state(str(folder / "half"))
        loader = accelerator.skip_first_batches(loader, HALF)
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if name == "plain" and number + 1 == HALF:
            accelerator.save_state(str(folder / "half"))
    keep(folder, name, accelerator.unwrap_model(model), rkfac.unwrap(optimizer).report())
    accelerator.free_memory()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    train(where, "plain")
    train(where, "accumulated", ACCUMULATED)
    train(where, "resumed", resume=True)
    Accelerator().end_training()

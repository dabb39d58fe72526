"""Mixed precision with a GradScaler, unscale_ and clipping: torch's recipe as it stands. `python examples/with_amp.py`"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from digits import accuracy, decay, loader, network

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16 if DEVICE == "cuda" else torch.bfloat16


def train(folder: Path, epochs: int) -> tuple[nn.Module, rkfac.RSKFAC]:
    """Train, from the checkpoint in the folder on if there is one."""
    model = network().to(DEVICE)
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    scaler = torch.amp.GradScaler(DEVICE)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    done, file = 0, folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["epochs"]
    for _ in range(done, epochs):
        for x, y in loader():
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=HALF):
                loss = F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epochs": epochs}, file)
    return model, optimizer


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(Path(folder), epochs=2)
        model, optimizer = train(Path(folder), epochs=7)  # goes on where the first one ended
    print(optimizer.report())
    print(f"mixed precision: {accuracy(model.cpu()):.1%} of the test images are recognised")

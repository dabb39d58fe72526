"""The plain loop: one line is another than with torch.optim.SGD. `python examples/plain.py`"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from digits import accuracy, decay, loader, network


def train(folder: Path, epochs: int) -> tuple[nn.Module, rkfac.RSKFAC]:
    """Train, from the checkpoint in the folder on if there is one."""
    model = network()
    # optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    done, file = 0, folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        done = saved["epochs"]
    for _ in range(done, epochs):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**states, "epochs": epochs}, file)
    return model, optimizer


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(Path(folder), epochs=2)
        model, optimizer = train(Path(folder), epochs=7)  # goes on where the first one ended
    print(optimizer.report())
    print(f"plain loop: {accuracy(model):.1%} of the test images are recognised")

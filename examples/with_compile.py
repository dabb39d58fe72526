"""torch.compile: hand the compiled model to the optimizer. `python examples/with_compile.py [BACKEND]`"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rkfac
from digits import accuracy, decay, loader, network


def train(folder: Path, epochs: int, backend: str = "inductor") -> tuple[nn.Module, rkfac.RSKFAC]:
    """Train, from the checkpoint in the folder on if there is one."""
    model: Any = torch.compile(network(), backend=backend, fullgraph=True)
    optimizer = rkfac.RSKFAC(model, lr=0.1, momentum=0.9)  # steps that collect statistics run without the graph
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
    backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    with TemporaryDirectory() as folder:
        train(Path(folder), 2, backend)
        model, optimizer = train(Path(folder), 7, backend)  # goes on where the first one ended
    print(optimizer.report())
    print(f"torch.compile: {accuracy(model):.1%} of the test images are recognised")

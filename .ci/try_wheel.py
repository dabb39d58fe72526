"""What a person does first with an installed rkfac: the command, five steps, and the types that editors read."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import torch
from torch import nn

import rkfac
import rkfac_lab


def main(command: str) -> None:
    """Try the installed packages, and the command at this path."""
    for package in (rkfac, rkfac_lab):
        assert "site-packages" in str(package.__file__), f"{package.__name__} comes from {package.__file__}"
        assert (resources.files(package) / "py.typed").is_file(), f"{package.__name__} has no py.typed"
    for folder in ("configs", "assets"):
        assert any((resources.files(rkfac_lab) / folder).iterdir()), f"rkfac_lab/{folder} is empty"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = rkfac.RSKFAC(model, lr=0.1)
    x, y = torch.randn(64, 8), torch.arange(64) % 3
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], losses
    print(
        f"rkfac {rkfac.__version__} from {Path(str(rkfac.__file__)).parent}: losses {losses[0]:.3f} to {losses[-1]:.3f}"
    )

    for words in (
        ["--version"],
        ["demo", "--help"],
        ["compare", "digits-mlp", "--optimizers", "sgd,rs-kfac", "--epochs", "1", "--seeds", "1", "--out", "runs"],
    ):
        said = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        assert said.returncode == 0, (
            f"rkfac {' '.join(words)} ended with {said.returncode}:\n{said.stdout}{said.stderr}"
        )
    print("the command works: --version, demo --help, and a comparison of one epoch")


if __name__ == "__main__":
    main(sys.argv[1])

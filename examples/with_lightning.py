"""Lightning: the optimizer is built in `configure_optimizers`. `python examples/with_lightning.py`"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import rkfac
from digits import accuracy, decay, loader, network


class Digits(L.LightningModule):
    """Nothing in it is other than with torch's optimizers, but for one line."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = rkfac.RSKFAC(self, lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, decay)}


def train(folder: Path, epochs: int) -> Digits:
    """Train, from Lightning's checkpoint in the folder on if there is one."""
    module, last = Digits(), folder / "last.ckpt"
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saving = ModelCheckpoint(folder, save_last=True)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[saving], **quiet)
    trainer.fit(module, loader(), ckpt_path=last if last.exists() else None)
    return module


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(Path(folder), epochs=2)
        module = train(Path(folder), epochs=7)  # goes on where the first one ended
    print(rkfac.unwrap(module.optimizers()).report())
    print(f"Lightning: {accuracy(module.model):.1%} of the test images are recognised")

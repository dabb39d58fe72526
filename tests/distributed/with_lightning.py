"""A training script with Lightning, which starts the other process itself: `python with_lightning.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from distributed.task import ACCUMULATED, CLIP, HALF, PROCESSES, SIZE, chosen, dataset, keep, scheduled
from distributed.together import build


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("reader")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = chosen(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduled(optimizer), "interval": "step"},
        }


class ByHand(Classifier):
    """Lightning's manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.clip_gradients(optimizer, CLIP)
        optimizer.step()
        scheduler.step()


def train(folder: Path, name: str, passes: int = 1, resume: bool = False, by_hand: bool = False) -> None:
    saving = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
    module = ByHand() if by_hand else Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy="ddp",
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=passes,
        gradient_clip_val=None if by_hand else CLIP,
        callbacks=[saving] if name == "plain" else [],
        enable_checkpointing=name == "plain",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(dataset(HALF), batch_size=SIZE // PROCESSES)
    trainer.fit(module, loader, ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
    keep(folder, name, module.model, module.optimizers().report())


if __name__ == "__main__":
    where = Path(sys.argv[1])
    train(where, "plain")
    train(where, "accumulated", ACCUMULATED)
    train(where, "resumed", resume=True)
    train(where, "by hand", by_hand=True)
    torch.distributed.destroy_process_group()

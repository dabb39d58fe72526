"""A training script with the Trainer of the transformers library: `torchrun --nproc_per_node 2 with_trainer.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import rkfac
from distributed.task import (
    ACCUMULATED,
    CLIP,
    HALF,
    PROCESSES,
    SETTINGS,
    SIZE,
    chosen,
    corpus,
    keep,
    language_model,
    scheduled,
)


def arguments(folder: Path, passes: int = 1, **keywords: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=SIZE // PROCESSES,
        gradient_accumulation_steps=passes,
        train_sampling_strategy="sequential",
        max_grad_norm=CLIP,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **keywords},
    )


def handed_over(folder: Path, name: str, passes: int = 1, resume: bool = False, **keywords: Any) -> None:
    """optimizers=: the optimizer is built first of all, in the first run before the processes have met."""
    model = language_model()
    optimizer = chosen(model)
    pair = (optimizer, scheduled(optimizer))
    trainer = Trainer(model, arguments(folder, passes, **keywords), train_dataset=corpus(), optimizers=pair)
    trainer.train(resume_from_checkpoint=str(folder / "trainer" / f"checkpoint-{HALF}") if resume else None)
    keep(folder, name, model, optimizer.report())


def by_class(folder: Path, name: str) -> None:
    """optimizer_cls_and_kwargs=: the Trainer builds the optimizer, from the parameters of its model."""
    model = language_model()
    trainer = Trainer(
        model,
        arguments(folder, lr_scheduler_type="constant"),
        train_dataset=corpus(positions=False),
        optimizer_cls_and_kwargs=(rkfac.RSKFAC, {**SETTINGS}),
    )
    trainer.train()
    keep(folder, name, model, rkfac.unwrap(trainer.optimizer).report())


if __name__ == "__main__":
    where = Path(sys.argv[1])
    handed_over(where, "plain", save_strategy="steps", save_steps=HALF)
    handed_over(where, "accumulated", ACCUMULATED)
    handed_over(where, "resumed", resume=True)
    by_class(where, "by class")
    torch.distributed.destroy_process_group()

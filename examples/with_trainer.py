"""The Trainer of transformers with GPT-2, BERT and ViT, small and from configurations alone. `python examples/with_trainer.py`"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

import rkfac
from digits import tensors

WORDS, LENGTH, SAMPLES = 40, 12, 256
Samples = list[dict[str, Tensor]]


def sentences() -> Tensor:
    """Each word is the sum of the two before it, so that there is something to learn."""
    torch.manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH))
    for place in range(2, LENGTH):
        words[:, place] = (words[:, place - 1] + words[:, place - 2]) % WORDS
    return words


def gpt2() -> tuple[PreTrainedModel, Samples]:
    """The next word."""
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes)
    return GPT2LMHeadModel(config), [{"input_ids": words, "labels": words} for words in sentences()]


def bert() -> tuple[PreTrainedModel, Samples]:
    """Whether a sentence begins with a word of the first half of the vocabulary."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes)
    data = [{"input_ids": words, "labels": (words[0] < WORDS // 2).long()} for words in sentences()]
    return BertForSequenceClassification(config), data


def vit() -> tuple[PreTrainedModel, Samples]:
    """Which digit an image shows."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    x, y, _, _ = tensors()
    images = x[:SAMPLES].view(-1, 1, 8, 8)
    return ViTForImageClassification(config), [
        {"pixel_values": image, "labels": label} for image, label in zip(images, y, strict=False)
    ]


MODELS: dict[str, Callable[[], tuple[PreTrainedModel, Samples]]] = {"GPT-2": gpt2, "BERT": bert, "ViT": vit}


def train(folder: Path, which: str, epochs: int, **settings: Any) -> Trainer:
    """Train, from the Trainer's checkpoint in the folder on if there is one."""
    torch.manual_seed(0)
    model, data = MODELS[which]()
    last = get_last_checkpoint(str(folder))
    if (
        last is not None
    ):  # the Trainer alone would leave ViT's layers as they were built: it saves them under other names
        model = type(model).from_pretrained(last)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    chosen = {"lr": 5e-3, "graft": "adamw", **settings}  # AdamW's own learning rate
    trainer = Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(rkfac.RSKFAC, chosen))
    trainer.train(resume_from_checkpoint=last)
    return trainer


if __name__ == "__main__":
    logging.set_verbosity_error()
    trainers = {}
    for name in MODELS:
        with TemporaryDirectory() as folder:
            train(Path(folder), name, epochs=2)
            trainers[name] = train(Path(folder), name, epochs=5)  # goes on where the first one ended
    for name, trainer in trainers.items():
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        print(rkfac.unwrap(trainer.optimizer).report())
        print(f"{name}: loss {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last of {len(losses)}\n")

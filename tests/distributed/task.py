"""What the scripts of the frameworks train: a task, an optimizer, a schedule, and where their parameters go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import TensorDataset

import rkfac
from distributed.together import batches
from optim.problems import parameters

PROCESSES = 2
STEPS, SIZE = 20, 12  # global batches, and samples in each
HALF = 10  # steps after which a checkpoint is written
CLIP = 0.3  # of the gradient's norm: every framework does it between the backward pass and the step
ACCUMULATED = 3  # passes a step; fewer are left for the last one, which frameworks take at the end of the data


# Nothing is drawn, and a run of this length has several refreshes.
SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "factor_every": 2, "inverse_every": 3, "rows": None}


def chosen(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all of them."""
    return rkfac.RSKFAC(model, **SETTINGS)


def scheduled(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.95)


def dataset(steps: int = STEPS) -> TensorDataset:
    found = batches("reader", steps, SIZE)
    return TensorDataset(*(torch.cat(column) for column in zip(*found, strict=True)))


def keep(folder: str | Path, name: str, model: nn.Module, layers: list[Any]) -> None:
    """This process's parameters, and what its optimizer's `report()` says is covered."""
    found = {"parameters": parameters(model), "covered": [layer.name for layer in layers if layer.covered]}
    torch.save(found, Path(folder) / f"{name}-{os.environ['LOCAL_RANK']}.pt")


def kept(folder: Path, name: str) -> list[dict[str, Any]]:
    """Of all processes, in the order of their ranks."""
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(PROCESSES)]


# --- for the Trainer: sentences of different lengths, so that no two processes have as many tokens

VOCABULARY, LENGTH = 40, 7


def language_model() -> nn.Module:
    """GPT-2 from a configuration alone, in double precision."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends, **drops)).double()


def corpus(positions: bool = True) -> list[dict[str, Tensor]]:
    """`positions` False: the model looks them up itself, once for all samples of a pass."""
    torch.manual_seed(4)
    found = []
    for ids in torch.randint(VOCABULARY, (STEPS * SIZE, LENGTH)):
        seen = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, ())).long()
        labels = ids.masked_fill(seen == 0, -100)
        own = {"position_ids": torch.arange(LENGTH)} if positions else {}
        found.append({"input_ids": ids, "attention_mask": seen, "labels": labels, **own})
    return found

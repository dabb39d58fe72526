"""Muon as a baseline: pytorch-optimizer's, which unlike torch's takes convolutions, made fit for CPUs."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_optimizer import Muon
from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5
from torch import Tensor, nn


class Float32Muon(Muon):
    """Orthogonalises in float32: bfloat16 products are slow on CPUs, and crash where a virtual machine hides AMX."""

    @staticmethod
    def _orthogonalize(group: dict[str, Any], updates: list[Tensor]) -> list[Tensor]:
        return [
            zero_power_via_newton_schulz_5(
                update.flatten(1), num_steps=group["ns_steps"], weights=group["ns_coeffs"], dtype=torch.float32
            )
            for update in updates
        ]


def muon(
    model: nn.Module,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    ns_steps: int = 5,
) -> torch.optim.Optimizer:
    """Muon for the matrices and convolutions, AdamW for embeddings, norms and biases, as one optimizer.

    `use_adjusted_lr` gives both the same scale of update, so that one learning rate serves both.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in embeddings]
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in taken]
    common = {"lr": lr, "weight_decay": weight_decay}
    groups = [
        {"params": matrices, "use_muon": True, "momentum": momentum, "use_adjusted_lr": True, **common},
        {"params": rest, "use_muon": False, "betas": betas, **common},
    ]
    kind = Muon if all(parameter.is_cuda for parameter in trained) else Float32Muon
    optimizer: torch.optim.Optimizer = kind([group for group in groups if group["params"]], ns_steps=ns_steps)
    return optimizer

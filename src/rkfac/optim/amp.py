"""What a GradScaler multiplied the loss by, and with it the captured gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rkfac import compat


def scaler_of(optimizer: torch.optim.Optimizer, grad_scaler: Any) -> Any:
    """The enabled GradScaler that has unscaled the gradients of the step that is being taken, None if there is none.

    It is the one whose `step` has called the optimizer's, or, where the optimizer was called by somebody else, the one that
    the user has named, if it has unscaled the gradients since its last `update`.
    """
    calling = compat.calling_scaler()
    scaler = grad_scaler if calling is None else calling
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler if calling is not None or compat.has_unscaled(scaler, optimizer) else None


def loss_scale(scaler: Any) -> Tensor | None:
    """The scale in the captured gradients, None without a scaler."""
    return None if scaler is None else compat.current_scale(scaler)

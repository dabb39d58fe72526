"""What a GradScaler tells an optimizer, and what follows for gradients and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rkfac import compat


def loss_scale(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], grad_scaler: Any, sampled: bool
) -> Tensor | bool | None:
    """The scale in the captured gradients, False without a scaler, None when the step must be skipped.

    GradScaler.step hands over `found_inf` and, unless the user unscaled already, `grad_scale`; gradients that are still
    scaled are unscaled here.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    if bool(found_inf):
        return None
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        for p in parameters:
            if p.grad is not None:
                p.grad.div_(scale.to(p.grad.device))
        return cast(Tensor, scale)
    if grad_scaler is not None:
        return compat.current_scale(grad_scaler)
    if sampled:
        return False
    raise RuntimeError(
        "scaler.unscale_(optimizer) was called before the step, so the scale of the captured statistics is unknown: "
        f"pass grad_scaler=scaler to {type(optimizer).__name__}"
    )

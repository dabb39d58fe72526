"""The paper's optimizers on a workload of any size: its settings, and ranks in proportion to the widths."""

from __future__ import annotations

from typing import Any

from rkfac_lab.config import RunConfig, from_dict

RANK, OVERSAMPLING = 220, 10  # the paper's, on layers up to 512 channels wide
WIDTH = 512


def rank_at(width: int) -> int:
    """The paper's rank where the widest layer has `width` channels instead of 512."""
    return max(1, round(RANK * width / WIDTH))


def run(workload: str, optimizer: str, arguments: dict[str, Any], *, epochs: int, **keys: Any) -> RunConfig:
    """The paper's settings with `arguments` over them; the learning rate goes up and down as everybody's there does."""
    chosen = {"name": optimizer, "preset": "paper", "arguments": arguments}
    return from_dict({"workload": workload, "optimizer": chosen, "epochs": epochs, "lr_shape": "linear", **keys})

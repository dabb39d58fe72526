"""Runs made by hand, so that tests of tables and plots know every number in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rkfac_lab.record import Run


def make_run(
    label: str,
    seed: int = 1,
    *,
    accuracies: Sequence[float] = (0.5, 0.9),
    epoch_seconds: Sequence[float] | None = None,
    targets: Sequence[float] = (),
    status: str = "finished",
    metric: str = "test_accuracy",
    mode: str = "max",
    workload: str = "digits-mlp",
) -> Run:
    """A run whose metric takes the given values, one an epoch; targets are judged here, independently of the lab."""
    seconds = list(epoch_seconds or [1.0] * len(accuracies))
    epochs: list[dict[str, Any]] = []
    for number, value in enumerate(accuracies, start=1):
        epochs.append(
            {
                "kind": "epoch",
                "epoch": number,
                "step": 6 * number,
                "train_seconds": sum(seconds[:number]),
                "cpu_seconds": 1.5 * sum(seconds[:number]),
                "epoch_seconds": seconds[number - 1],
                "eval_seconds": 0.01,
                "train_loss": 2.0 * 0.5**number,
                "test_loss": 2.2 * 0.6**number,
                "test_accuracy": None,
                "lr": 0.1,
                metric: value,
            }
        )
    judged = []
    for target in targets:
        hit = next((e for e in epochs if (e[metric] >= target if mode == "max" else e[metric] <= target)), None)
        judged.append(
            {
                "metric": metric,
                "value": target,
                "mode": mode,
                "reached": hit is not None,
                "seconds": hit and hit["train_seconds"],
                "cpu_seconds": hit and hit["cpu_seconds"],
                "step": hit and hit["step"],
                "epoch": hit and hit["epoch"],
            }
        )
    summary = {
        "workload": workload,
        "optimizer": label,
        "label": label,
        "seed": seed,
        "status": status,
        "epochs": len(epochs),
        "steps": 6 * len(epochs),
        "train_seconds": sum(seconds),
        "targets": judged,
        "best": {},
        "final": epochs[-1] if epochs else {},
    }
    return Run(path=Path(f"{label}-{seed}"), config={}, environment={}, epochs=epochs, layers=[], summary=summary)

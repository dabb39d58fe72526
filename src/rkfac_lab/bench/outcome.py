"""How benchmarks are written down: what was measured, and on which machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rkfac_lab.record import environment

MEDIANS = "medians, ± half the distance between the quartiles"


def outcome(benchmark: str, results: Sequence[Any], **facts: Any) -> dict[str, Any]:
    """Records with what is needed to read them later."""
    return {
        "benchmark": benchmark,
        "machine": environment(torch.device("cpu")),
        **facts,
        "results": [asdict(result) for result in results],
    }


def megabytes(count: int) -> str:
    """Bytes for a table, in units of 10^6."""
    return f"{count / 1e6:.1f}"

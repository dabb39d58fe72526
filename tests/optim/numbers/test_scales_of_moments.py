"""EK-FAC's moments are squares of gradients: of any size that float32 can hold, they move the weights as float64 says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import rkfac
from optim import stated
from optim.numbers.test_scales import SCALES, SMALL, _one_sketch_for_both_precisions, assert_as_in_float64

__all__ = ["_one_sketch_for_both_precisions"]  # a fixture of this room too

BUILDS: dict[str, Any] = {
    "samples": stated.EKFAC,
    "running": partial(stated.EKFAC, moments="running"),
    "samples, truncated": partial(stated.EKFAC, decomposition=rkfac.RSVD(), **SMALL),
    "running, truncated": partial(stated.EKFAC, moments="running", decomposition=rkfac.RSVD(), **SMALL),
    "running, a half": partial(stated.EKFAC, moments="running", power=-0.5),
}


@pytest.mark.parametrize("clip", [0.07, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("what", ["loss", "inputs"])
@pytest.mark.parametrize("name", BUILDS)
def test_the_update_is_that_of_float64_whatever_loss_and_inputs_are_multiplied_by(
    name: str, what: str, clip: float | None
) -> None:
    for scale in SCALES:
        lr = 0.1 if clip else 0.01 * scale if what == "loss" else 0.01 * min(1.0, scale)
        if name == "running, a half":
            lr = 0.01  # the direction does not grow with the loss
        lr = 0.01 * min(1.0, scale) if what == "inputs" else lr
        sizes = {"loss": 1.0, "inputs": 1.0, what: scale}
        assert_as_in_float64(BUILDS[name], lr=lr, update_clip=clip, factor_start="unbiased", **sizes)

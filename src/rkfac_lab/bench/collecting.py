"""`rkfac bench statistics`: seconds to turn one call's input and output gradient into two updated running factors."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import rkfac
from rkfac_lab.bench import streams
from rkfac_lab.bench.outcome import MEDIANS, outcome
from rkfac_lab.bench.timing import Spread, in_turns
from rkfac_lab.errors import LabError

PLAIN = "unfold + matmul"
LAYERS = ("64@32", "128@16", "256@8", "512@4", "linear4096")
DECAY = 0.95


@dataclass(frozen=True)
class Measurement:
    """One way on one layer."""

    layer: str
    batch: int
    method: str
    seconds: Spread


@dataclass(frozen=True)
class Call:
    """A layer with an input and the gradient at its output."""

    layer: nn.Module
    x: Tensor
    g: Tensor


def call(name: str, batch: int) -> Call:
    """A 3x3 convolution, `channels@side` as in VGG16, or a `linear` layer with its width."""
    torch.manual_seed(0)
    form = re.fullmatch(r"(?P<channels>[1-9]\d{0,4})@(?P<side>[1-9]\d{0,3})|linear(?P<width>[1-9]\d{0,5})", name)
    if form is None:
        raise LabError(f"{name!r} is no layer such as 64@32 (channels@side) or linear4096.")
    layer: nn.Module
    if form["width"]:
        width = int(form["width"])
        layer = nn.Linear(width, width)
        ((x, _),) = streams.signals(batch, width, 10, pool=1)
    else:
        channels = int(form["channels"])
        layer = nn.Conv2d(channels, channels, 3, padding=1)
        ((x, _),) = streams.pictures(batch, channels, int(form["side"]), pool=1)
    x = F.relu(x)  # as after an activation
    return Call(layer, x, torch.randn_like(layer(x)).div_(batch).detach())


def run(
    layers: Sequence[str] = LAYERS,
    batch: int = 64,
    rows: int = 1024,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every way on every layer, interleaved; Linear layers see four times the batch."""
    found = []
    for name in layers:
        progress(name)
        size = batch if "@" in name else 4 * batch
        one = call(name, size)
        contestants = {
            PLAIN: plain(one),
            "rkfac, all rows": own(one, rows=None),
            f"rkfac, {rows} drawn rows": own(one, rows=rows),
            **_curvlinops(one),
        }
        for contestant in contestants.values():
            contestant()
        for method, seconds in in_turns(contestants, rounds, settle=0.05).items():
            found.append(Measurement(name, size, method, seconds))
    return found


def own(one: Call, rows: int | None) -> Callable[[], float]:
    """rkfac's way, timed by its own clock: what its hooks and its step spend on statistics."""
    # Small rank and no learning rate: refresh and step have to be there, and do not count.
    layer = copy.deepcopy(one.layer)  # which no other contestant watches
    optimizer = rkfac.RSKFAC(layer, lr=0.0, rows=rows, factor_decay=DECAY, factor_every=1, rank=4)
    for group in optimizer.param_groups:
        group["inverse_every"] = 1 << 40

    def spent() -> float:
        return sum(report.seconds.get("statistics", 0.0) for report in optimizer.report())

    def collect() -> float:
        before = spent()
        optimizer.zero_grad()
        layer(one.x).backward(one.g)
        optimizer.step()
        return spent() - before

    return collect


def plain(one: Call) -> Callable[[], float]:
    """What anybody would write: all patches at once, two products."""
    averages: list[Tensor] = []

    def rows() -> tuple[Tensor, Tensor]:
        if one.x.ndim == 2:
            return one.x, one.g
        return F.unfold(one.x, 3, padding=1).mT.flatten(0, 1), one.g.flatten(2).mT.flatten(0, 1)

    def collect() -> float:
        begin = time.perf_counter()
        a, g = rows()
        a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
        for side, part in enumerate((a, g)):
            if len(averages) == side:
                averages.append(part.new_zeros(part.shape[1], part.shape[1]))
            averages[side].mul_(DECAY).addmm_(part.mT, part, alpha=(1 - DECAY) / len(part))
        return time.perf_counter() - begin

    return collect


def _curvlinops(one: Call) -> dict[str, Callable[[], float]]:
    """curvlinops' hooks on the same call, where it is installed; it has no running averages to update."""
    try:
        from curvlinops import FisherType, KFACLinearOperator
    except ImportError:
        return {}

    class Timed(KFACLinearOperator):
        """Counts the seconds of the two hooks."""

        seconds = 0.0

        def _hook_accumulate_input_covariance(self, *arguments: Any, **keywords: Any) -> None:
            begin = time.perf_counter()
            super()._hook_accumulate_input_covariance(*arguments, **keywords)
            self.seconds += time.perf_counter() - begin

        def _accumulate_gradient_covariance(self, *arguments: Any, **keywords: Any) -> None:
            begin = time.perf_counter()
            super()._accumulate_gradient_covariance(*arguments, **keywords)
            self.seconds += time.perf_counter() - begin

    model = nn.Sequential(one.layer, nn.Flatten())

    def collect() -> float:
        operator = Timed(
            model,
            nn.MSELoss(),
            list(one.layer.parameters()),
            [(one.x, torch.zeros(len(one.x), one.g[0].numel()))],
            check_deterministic=False,
            fisher_type=FisherType.EMPIRICAL,
            separate_weight_and_bias=False,
            num_per_example_loss_terms=1,
            num_data=len(one.x),
        )
        operator.compute_kronecker_factors()
        return operator.seconds

    return {"curvlinops": collect}


def table(rows: Sequence[Measurement]) -> Table:
    """Seconds, and how many times faster than the plain way."""
    shown = Table(title="Statistics of one call (larger ratio: faster)")
    for heading in ("layer", "batch", "method", "seconds", f"x {PLAIN}"):
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "method" else "right")
    for layer in dict.fromkeys(row.layer for row in rows):
        mine = [row for row in rows if row.layer == layer]
        unit = next(row.seconds.median for row in mine if row.method == PLAIN)
        for row in mine:
            ratio = f"{unit / row.seconds.median:.2f}"
            shown.add_row(layer, str(row.batch), row.method, str(row.seconds), ratio)
        shown.add_section()
    shown.caption = f"channels@side: 3x3 convolutions of VGG16; {MEDIANS}"
    return shown


def as_json(rows: Sequence[Measurement]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("statistics", rows)

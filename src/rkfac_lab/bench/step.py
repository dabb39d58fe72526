"""`rkfac bench step`: seconds a step of each optimizer, amortised over one full period, as ratios to SGD in one run.

A step is plain, or also collects statistics, or also decomposes. Each kind is timed apart, contestants interleaved, and
weighted by how often it occurs: one in `inverse_every` decomposes, one in `factor_every` collects.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import rkfac
from rkfac_lab import models

KINDS = ("plain", "statistics", "refresh")
NEVER = 1 << 40


@dataclass(frozen=True)
class Problem:
    """A model with one fixed batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    rounds: int


def _images(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        return torch.randn(*shape, generator=g), torch.randint(0, 10, (shape[0],), generator=g)

    return make


PROBLEMS = {
    "mlp": Problem(
        "MLP 784-4096-4096-10, batch 256",
        lambda: models.build("mlp", sizes=(784, 4096, 4096, 10)),
        _images(256, 784),
        8,
    ),
    "vgg16bn": Problem("VGG16_bn, batch 256", lambda: models.build("vgg16bn"), _images(256, 3, 32, 32), 2),
    "vgg-small": Problem(
        "VGG16_bn at a quarter of the width, batch 256",
        lambda: models.build("vgg16bn", width=0.25),
        _images(256, 3, 32, 32),
        4,
    ),
}


def contestants() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """SGD as the unit, the three optimizers at the paper's settings, and the recommended defaults."""
    paper = rkfac.paper_defaults()
    return {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4),
        "RS-KFAC (paper)": lambda m: rkfac.RSKFAC(m, **{**paper, "lr": 1e-4}),
        "SRE-KFAC (paper)": lambda m: rkfac.SREKFAC(m, **{**paper, "lr": 1e-4}),
        "K-FAC (paper)": lambda m: rkfac.KFAC(m, **{**paper, "lr": 1e-4}),
        # Without the many refreshes of the first steps: what is measured is the rest of the training.
        "RS-KFAC (default)": lambda m: rkfac.RSKFAC(m, lr=1e-4, eager_start=False),
    }


@dataclass
class Contestant:
    """One optimizer on its own copy of the model."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def second_order(self) -> bool:
        """Whether it has statistics and decompositions at all."""
        return hasattr(self.optimizer, "report")

    def step(self, kind: str, x: Tensor, y: Tensor) -> None:
        """One step of a kind."""
        if self.second_order:
            for group in self.optimizer.param_groups:
                group["inverse_every"] = 1 if kind == "refresh" else NEVER
                group["factor_every"] = NEVER if kind == "plain" else 1
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.seconds[kind].append(time.perf_counter() - begin)


@dataclass(frozen=True)
class Result:
    """Median seconds of each kind of step, their amortised sum, and the ratio to SGD."""

    problem: str
    optimizer: str
    factor_every: int
    inverse_every: int
    seconds: dict[str, float]
    amortised: float
    ratio: float
    phases: dict[str, float]


def amortised(seconds: Mapping[str, float], factor_every: int, inverse_every: int) -> float:
    """Seconds a step over one full period; refresh steps collect statistics too."""
    refresh, collect = 1 / inverse_every, 1 / factor_every
    both = min(refresh, collect)
    return seconds["plain"] * (1 - collect) + seconds["statistics"] * (collect - both) + seconds["refresh"] * refresh


def run(
    problem: Problem,
    chosen: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]],
    rounds: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Time every contestant on one problem: a warm-up round, then interleaved rounds of all kinds of step."""
    x, y = problem.batch()
    entrants = []
    for name, build in chosen.items():
        torch.manual_seed(0)
        model = problem.build()
        entrants.append(Contestant(name, model, build(model)))
    periods = {
        e.name: (e.optimizer.param_groups[0]["factor_every"], e.optimizer.param_groups[0]["inverse_every"])
        if e.second_order
        else (1, 1)
        for e in entrants
    }
    total = (rounds or problem.rounds) + 1
    for round_number in range(total):
        for entrant in entrants:
            progress(f"{problem.name}: round {round_number + 1} of {total}, {entrant.name}")
            order = ("plain", "plain", "statistics", "refresh") if entrant.second_order else ("plain", "plain")
            if round_number == 0 and entrant.second_order:  # the first step must have statistics and a basis
                order = ("refresh", "plain", "statistics", "refresh")
            for kind in order:
                entrant.step(kind, x, y)
        if round_number == 0:
            for entrant in entrants:
                entrant.seconds = {kind: [] for kind in KINDS}
    return [_result(problem, entrant, periods[entrant.name], entrants[0]) for entrant in entrants]


def _result(problem: Problem, entrant: Contestant, period: tuple[int, int], unit: Contestant) -> Result:
    seconds = {kind: statistics.median(values) for kind, values in entrant.seconds.items() if values}
    whole = amortised(seconds, *period) if entrant.second_order else seconds["plain"]
    phases: dict[str, float] = {}
    report = getattr(entrant.optimizer, "report", None)
    if report is not None:
        # Phase totals are over all steps run here; told a collecting, decomposing or any step.
        steps = {"statistics": 0, "refresh": 0, "apply": 0}
        for kind, values in entrant.seconds.items():
            steps["apply"] += len(values)
            steps["statistics"] += len(values) if kind != "plain" else 0
            steps["refresh"] += len(values) if kind == "refresh" else 0
        warm_up = {"statistics": 3, "refresh": 2, "apply": 4}
        for phase, count in steps.items():
            phases[phase] = sum(layer.seconds.get(phase, 0.0) for layer in report()) / (count + warm_up[phase])
    base = statistics.median(unit.seconds["plain"])
    return Result(problem.name, entrant.name, *period, seconds, whole, whole / base, phases)


def table(results: Sequence[Result]) -> Table:
    """Ratios to SGD, seconds by kind of step and by phase."""
    shown = Table(title="Seconds a step, amortised over one period (statistics and inverses included)")
    headings = (
        "problem",
        "optimizer",
        "every",
        "a step",
        "x SGD",
        "plain",
        "statistics",
        "refresh",
        "collect",
        "decompose",
        "apply",
    )
    for heading in headings:
        shown.add_column(heading, no_wrap=True, justify="left" if heading in ("problem", "optimizer") else "right")
    previous = ""
    for r in results:
        if previous and r.problem != previous:
            shown.add_section()
        phases = [f"{r.phases[p]:.3f}" if p in r.phases else "-" for p in ("statistics", "refresh", "apply")]
        kinds = [f"{r.seconds[k]:.3f}" if k in r.seconds else "-" for k in KINDS]
        every = f"{r.factor_every}/{r.inverse_every}" if r.phases else "-"
        shown.add_row(
            "" if r.problem == previous else r.problem,
            r.optimizer,
            every,
            f"{r.amortised:.3f}",
            f"{r.ratio:.2f}",
            *kinds,
            *phases,
        )
        previous = r.problem
    shown.caption = (
        "plain, statistics, refresh: whole steps; collect, decompose, apply: what a phase takes when it runs"
    )
    return shown


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return {
        "benchmark": "step",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "results": [dataclasses.asdict(r) for r in results],
    }

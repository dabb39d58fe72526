"""`rkfac bench step`: seconds a step of each optimizer, amortised over one full period, as ratios to SGD in one run.

A step is plain, or also collects statistics, or also decomposes. Each kind is timed apart, contestants interleaved, and
weighted by how often it occurs: one in `inverse_every` decomposes, one in `factor_every` collects. All contestants walk
through the same stream of batches (`streams`), and the averages have seen several of them before anything is timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rkfac_lab.bench.contestants import Contestant
from rkfac_lab.bench.entrant import PHASES, Entrant
from rkfac_lab.bench.holdings import checkpoint_size, held, layers
from rkfac_lab.bench.outcome import MEDIANS, megabytes, outcome
from rkfac_lab.bench.problems import Problem
from rkfac_lab.bench.timing import Spread, digits

KINDS = ("plain", "statistics", "refresh")


@dataclass(frozen=True)
class Result:
    """Seconds of each kind of step, their amortised sum, the ratio to SGD, phases of an amortised step, and memory."""

    problem: str
    stream: str
    optimizer: str
    every: dict[str, int]
    seconds: dict[str, Spread]
    amortised: Spread
    ratio: Spread
    phases: dict[str, float]
    held: dict[str, int]
    checkpoint: int
    ranks: dict[str, tuple[int | None, int | None]]  # of inputs and output gradients by layer, which explain the rest


def amortised(seconds: Mapping[str, float], factor_every: int, inverse_every: int) -> float:
    """Seconds a step over one full period; refresh steps collect statistics too."""
    refresh, collect = 1 / inverse_every, 1 / factor_every
    both = min(refresh, collect)
    middle = seconds.get("statistics", 0.0) * (collect - both)
    return seconds["plain"] * (1 - collect) + middle + seconds["refresh"] * refresh


def over_a_period(every: Mapping[str, int]) -> Callable[[Mapping[str, float]], float]:
    """What seconds by kind of step mean for a step of a contestant with these periods."""
    if not every:
        return lambda seconds: seconds["plain"]
    inverse_every = every["refresh"]
    # Who has no statistics steps collects on every step: its other steps are all alike.
    factor_every = every.get("statistics", inverse_every)
    return lambda seconds: amortised(seconds, factor_every, inverse_every)


def run(
    problem: Problem,
    chosen: Mapping[str, Contestant],
    rounds: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Time every contestant on one problem: a warm-up, then interleaved rounds of all kinds of step."""
    entrants = race(problem, chosen, rounds, progress)
    return [_result(problem, entrant, entrants[0]) for entrant in entrants]


def race(
    problem: Problem,
    chosen: Mapping[str, Contestant],
    rounds: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Entrant]:
    """All contestants after their last round, with what was measured."""
    batches = problem.batches()
    entrants = [Entrant(name, contestant, problem) for name, contestant in chosen.items()]
    schedule = problem.schedule(rounds)
    for number, planned in enumerate(schedule):
        turn = number % len(entrants)  # nobody is always the one after the longest
        for entrant in entrants[turn:] + entrants[:turn]:
            progress(f"{problem.name}: round {number} of {len(schedule) - 1}, {entrant.name}")
            for kind, at in planned:
                if kind in entrant.kinds:
                    entrant.step(kind, batches[at % len(batches)])
            if number == 0:
                entrant.forget()
            else:
                entrant.end_round()
    return entrants


def _ratios(entrant: Entrant, sgd: Entrant, a_step: Callable[[Mapping[str, float]], float]) -> list[float]:
    """To SGD round by round: what slows a machine down for some seconds slows down both."""
    own = {kind: entrant.by_round(kind) for kind in entrant.kinds}
    units = [statistics.median(seconds) for seconds in sgd.by_round("plain")]
    return [
        a_step({kind: statistics.median(rounds[number]) for kind, rounds in own.items()}) / unit
        for number, unit in enumerate(units)
    ]


def _result(problem: Problem, entrant: Entrant, sgd: Entrant) -> Result:
    a_step = over_a_period(entrant.every)
    seconds = {kind: Spread.of(entrant.seconds(kind)) for kind in entrant.kinds}
    whole = Spread.through(a_step, seconds)
    phases = {
        phase: a_step({kind: statistics.median(entrant.phases[kind][phase]) for kind in entrant.kinds})
        for phase in PHASES
    }
    return Result(
        problem=problem.name,
        stream=problem.stream,
        optimizer=entrant.name,
        every=entrant.every,
        seconds=seconds,
        amortised=whole,
        ratio=Spread.of(_ratios(entrant, sgd, a_step)),
        phases=phases,
        held=held(entrant.optimizer),
        checkpoint=checkpoint_size(entrant.optimizer),
        ranks={layer.name: (layer.rank_input, layer.rank_output) for layer in layers(entrant.optimizer)},
    )


def shares(phases: Mapping[str, float]) -> dict[str, float]:
    """Of the amortised step, by phase."""
    whole = sum(phases.values())
    return {phase: seconds / whole for phase, seconds in phases.items()}


def _by_problem(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    for problem in dict.fromkeys(result.problem for result in results):
        yield problem, [result for result in results if result.problem == problem]


def _columns(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "optimizer" else "right", no_wrap=True)


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """One a problem: ratios to SGD, seconds by kind of step, memory."""
    for problem, mine in _by_problem(results):
        shown = Table(title=f"{problem}: seconds a step, amortised over one period, and by kind of step")
        _columns(shown, "optimizer", "every", "x SGD", "a step", *KINDS, "held MB", "checkpoint MB")
        for r in mine:
            kinds = [str(r.seconds[kind]) if kind in r.seconds else "-" for kind in KINDS]
            every = "/".join(map(str, r.every.values())) or "-"
            memory = megabytes(sum(r.held.values())), megabytes(r.checkpoint)
            ratio = f"{r.ratio.median:.2f} ({r.ratio.low:.2f}-{r.ratio.high:.2f})"
            shown.add_row(r.optimizer, every, ratio, str(r.amortised), *kinds, *memory)
        shown.caption = f"{MEDIANS}; x SGD: of the ratios within a round, and their quartiles; held: between steps"
        yield shown


def profiles(results: Sequence[Result]) -> Iterator[Table]:
    """One a problem: seconds and share of the amortised step by phase."""
    for problem, mine in _by_problem(results):
        shown = Table(title=f"{problem}: seconds and share of an amortised step by phase")
        _columns(shown, "optimizer", *PHASES, "sum")
        for r in mine:
            parts = shares(r.phases)
            cells = [f"{digits(r.phases[phase])} ({parts[phase]:.1%})" for phase in PHASES]
            shown.add_row(r.optimizer, *cells, digits(sum(r.phases.values())))
        shown.caption = (
            "statistics gathered inside of the backward pass count as statistics; update: the rest of step()"
        )
        yield shown


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("step", results)

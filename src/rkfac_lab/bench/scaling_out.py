"""`rkfac bench scaling-out`: seconds a step in several processes, as ratios to one process measured in the same run.

The batch of the problem is that of all processes together; each has one thread. All processes are there from the start and
take turns: whoever is not measured waits for orders. Seconds are the first process's; those of an exchange hold waiting for
the slowest. Beside the measurements stands what `scaling_model` makes of the seconds of one process, of the bytes that
were sent and of the time that bare sums took here.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from rkfac_lab.averaging import average_gradients
from rkfac_lab.bench.contestants import chosen
from rkfac_lab.bench.crowd import Crowd
from rkfac_lab.bench.outcome import MEDIANS, megabytes, outcome
from rkfac_lab.bench.problems import PROBLEMS, Problem, named
from rkfac_lab.bench.scaling_model import Alone, Machine, predicted
from rkfac_lab.bench.sharer import SENT, SHARED_PHASES, Sharer
from rkfac_lab.bench.step import KINDS, over_a_period
from rkfac_lab.bench.timing import Spread, digits
from rkfac_lab.errors import LabError
from rkfac_lab.ranks import Ranks
from rkfac_lab.record import finite

ON_PAPER = (8, 64, 1000)
BASELINE = "SGD"
Steps = list[tuple[str, dict[str, float], dict[str, int]]]  # of a round: kind of step, seconds by phase, bytes sent


@dataclass(frozen=True)
class Result:
    """One optimizer in so many processes; ratios are within a round, to itself in one process and to SGD in as many.

    `modelled`: seconds of an amortised step by part, on this machine, where bare sums were as quick as `machine` says.
    """

    problem: str
    stream: str
    optimizer: str
    processes: int
    every: dict[str, int]
    seconds: dict[str, Spread]
    amortised: Spread
    to_one: Spread
    to_sgd: Spread
    phases: dict[str, float]
    sent: dict[str, dict[str, int]]  # by kind of step
    machine: Machine
    modelled: dict[str, float]


@dataclass(frozen=True)
class Paper:
    """On paper: every process has the batch that one had here, and messages take what was said."""

    problem: str
    optimizer: str
    processes: int
    machine: Machine
    modelled: dict[str, float]


def work(rank: int, size: int, name: str, wanted: Sequence[str]) -> Callable[..., Any]:
    """What a process of the benchmark does with an order: steps of a contestant, or what is known of one."""
    problem, together = PROBLEMS[name], Ranks(rank, size)
    batches = problem.batches()
    sharers = {who: Sharer(who, one, problem, together) for who, one in chosen(problem, wanted).items()}

    def steps(who: str, planned: Sequence[tuple[str, int]]) -> Steps:
        sharer = sharers[who]
        sharer.forget()
        for kind, at in planned:
            if kind in sharer.kinds:
                sharer.step(kind, batches[at % len(batches)])
        found: Steps = []
        taken = dict.fromkeys(sharer.kinds, 0)
        for kind, sent in sharer.bytes:
            own = {phase: seconds[taken[kind]] for phase, seconds in sharer.phases[kind].items()}
            taken[kind] += 1
            found.append((kind, own, sent))
        return found

    def bare_sums() -> tuple[float, float]:
        """Seconds to average a gradient of one number, and those of the model, as a step does it and with nothing beside it."""
        model = next(iter(sharers.values())).model
        return _seconds_of_a_sum(nn.Linear(1, 1, bias=False), together), _seconds_of_a_sum(model, together)

    def facts(who: str) -> tuple[dict[str, int], list[float], int]:
        sharer = sharers[who]
        return sharer.every, sharer.costs(), sum(p.nbytes for p in sharer.model.parameters())

    orders: dict[str, Callable[..., Any]] = {"steps": steps, "bare sums": bare_sums, "facts": facts}
    return lambda order, *given: orders[order](*given)


def _seconds_of_a_sum(model: nn.Module, together: Ranks) -> float:
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # memory that is there, not pages of zeros
    average_gradients(model, together)
    begin = time.perf_counter()
    average_gradients(model, together)
    return time.perf_counter() - begin


def run(
    names: Sequence[str],
    sizes: Sequence[int] = (1, 2),
    wanted: Sequence[str] = ("RS-KFAC (default)",),
    rounds: int | None = None,
    bandwidth: float = 10e9,
    latency: float = 1e-5,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Result], list[Paper]]:
    """Measure every contestant in every number of processes, and what is to be expected of more of them."""
    if sizes[0] != 1:
        raise LabError("--ranks begins with 1, which the others are divided by.")
    results: list[Result] = []
    papers: list[Paper] = []
    for name, problem in zip(names, named(names), strict=True):
        crowds = [Crowd(size, work, name, tuple(wanted)) for size in sizes]
        try:
            measured = _Measured(problem, crowds, list(chosen(problem, wanted)))
            measured.race(rounds, progress)
        finally:
            for crowd in crowds:
                crowd.end()
        results += measured.results()
        papers += measured.papers(Machine(bandwidth, latency))
    return results, papers


class _Measured:
    """All that was measured on one problem."""

    def __init__(self, problem: Problem, crowds: Sequence[Crowd], names: Sequence[str]) -> None:
        self.problem, self.crowds, self.names = problem, crowds, names
        self.rounds: dict[tuple[str, int], list[Steps]] = {(n, crowd.size): [] for n in names for crowd in crowds}
        self.sums: dict[int, list[tuple[float, float]]] = {crowd.size: [] for crowd in crowds}
        self.facts = {name: crowds[0].do("facts", name)[0] for name in names}

    def race(self, rounds: int | None, progress: Callable[[str], None]) -> None:
        """A warm-up, then rounds in which everybody has a turn."""
        entries = [(name, crowd) for name in self.names for crowd in self.crowds]
        schedule = self.problem.schedule(rounds)
        for number, planned in enumerate(schedule):
            turn = number % len(entries)  # nobody is always the one after the longest
            for name, crowd in entries[turn:] + entries[:turn]:
                progress(f"{self.problem.name}: round {number} of {len(schedule) - 1}, {name} in {crowd.size}")
                found: Steps = crowd.do("steps", name, planned)[0]
                if number:
                    self.rounds[name, crowd.size].append(found)
                    self.sums[crowd.size].append(crowd.do("bare sums")[0])

    def results(self) -> list[Result]:
        return [self._result(name, crowd.size) for name in self.names for crowd in self.crowds]

    def papers(self, machine: Machine) -> list[Paper]:
        return [
            Paper(self.problem.name, name, count, machine, predicted(self._alone(name), machine, count, grows=True))
            for name in self.names
            for count in (1, *ON_PAPER)
        ]

    def _result(self, name: str, size: int) -> Result:
        every = self.facts[name][0]
        a_step = over_a_period(every)
        seconds = {kind: Spread.of(self._seconds(name, size, kind)) for kind in self._kinds(name)}
        phases = {p: a_step({k: self._median(name, size, k, p) for k in self._kinds(name)}) for p in SHARED_PHASES}
        machine = self._machine(size)
        return Result(
            problem=self.problem.name,
            stream=self.problem.stream,
            optimizer=name,
            processes=size,
            every=every,
            seconds=seconds,
            amortised=Spread.through(a_step, seconds),
            to_one=self._ratio((name, size), (name, 1)),
            to_sgd=self._ratio((name, size), (BASELINE, size)),
            phases=phases,
            sent=self._sent(name, size),
            machine=machine,
            modelled=predicted(self._alone(name), machine, size),
        )

    def _kinds(self, name: str) -> tuple[str, ...]:
        return ("plain", *self.facts[name][0])

    def _all(self, name: str, size: int, kind: str) -> list[tuple[dict[str, float], dict[str, int]]]:
        return [(own, sent) for one in self.rounds[name, size] for k, own, sent in one if k == kind]

    def _seconds(self, name: str, size: int, kind: str) -> list[float]:
        return [sum(own.values()) for own, _ in self._all(name, size, kind)]

    def _median(self, name: str, size: int, kind: str, phase: str) -> float:
        return statistics.median(own[phase] for own, _ in self._all(name, size, kind))

    def _sent(self, name: str, size: int) -> dict[str, dict[str, int]]:
        """Bytes that the first process handed over, by kind of step.

        The median: the first step after a lever was moved may still send what was planned before.
        """
        return {
            kind: {what: statistics.median_low(sent[what] for _, sent in self._all(name, size, kind)) for what in SENT}
            for kind in self._kinds(name)
        }

    def _ratio(self, one: tuple[str, int], other: tuple[str, int]) -> Spread:
        pairs = zip(self._amortised(*one), self._amortised(*other), strict=True)
        return Spread.of([mine / its for mine, its in pairs])

    def _amortised(self, name: str, size: int) -> list[float]:
        """Round by round."""
        a_step = over_a_period(self.facts[name][0])
        return [
            a_step(
                {
                    k: statistics.median(sum(own.values()) for kind, own, _ in one if kind == k)
                    for k in self._kinds(name)
                }
            )
            for one in self.rounds[name, size]
        ]

    def _machine(self, size: int) -> Machine:
        """What bare sums took here."""
        if size == 1:
            return Machine(math.inf, 0.0, os.cpu_count())
        one, many = (statistics.median(seconds) for seconds in zip(*self.sums[size], strict=True))
        numbers = self.facts[self.names[0]][2]
        rounds = 2 * math.ceil(math.log2(size))
        return Machine(2 * (size - 1) / size * numbers / max(many - one, 1e-9), one / rounds, os.cpu_count())

    def _alone(self, name: str) -> Alone:
        every, costs, parameters = self.facts[name]

        def took(kind: str, *phases: str) -> float:
            return sum(self._median(name, 1, kind, phase) for phase in phases) if kind in self._kinds(name) else 0.0

        largest = max(crowd.size for crowd in self.crowds)
        sent = self._sent(name, largest)
        # Every process sends its own decompositions: together they send all.
        all_decompositions = largest * sent.get("refresh", {}).get("decompositions", 0)
        return Alone(
            passes=took("plain", "forward/backward"),
            statistics=took("statistics", "statistics"),
            refresh=took("refresh", "refresh"),
            rest=took("plain", "application", "update"),
            every=every,
            sent={
                "gradients": parameters,
                "statistics": sent.get("statistics", {}).get("statistics", 0),
                "decompositions": all_decompositions,
            },
            costs=costs,
        )


def table(results: Sequence[Result]) -> Table:
    """Ratios and seconds by number of processes, of one problem."""
    shown = Table(title=f"{results[0].problem} for all processes together, one thread each: seconds a step")
    for heading in ("optimizer", "processes", "x one", "x SGD", "a step", "modelled", *KINDS):
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right", no_wrap=True)
    for r in results:
        kinds = [str(r.seconds[kind]) if kind in r.seconds else "-" for kind in KINDS]
        ratios = [f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})" for one in (r.to_one, r.to_sgd)]
        shown.add_row(
            r.optimizer, str(r.processes), *ratios, str(r.amortised), digits(sum(r.modelled.values())), *kinds
        )
    shown.caption = (
        f"{MEDIANS}; x one: to itself in one process, x SGD: to SGD in as many, both within a round; modelled: from one process, "
        "the bytes sent, and what bare sums take here"
    )
    return shown


def tables(results: Sequence[Result], papers: Sequence[Paper]) -> Iterator[Table]:
    """Three a problem: what was measured, by phase, and what more processes would take."""
    for problem in dict.fromkeys(result.problem for result in results):
        mine = [result for result in results if result.problem == problem]
        yield table(mine)
        yield phases(mine)
        yield on_paper([paper for paper in papers if paper.problem == problem])


def phases(results: Sequence[Result]) -> Table:
    """Seconds of an amortised step by phase, and what is sent in a step of each kind."""
    shown = Table(title="Seconds of an amortised step by phase; MB that a process hands over")
    for heading in ("optimizer", "processes", *SHARED_PHASES, *(f"MB {kind}" for kind in KINDS)):
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for r in results:
        sent = [megabytes(sum(r.sent[k].values())) if k in r.sent else "-" for k in KINDS]
        shown.add_row(r.optimizer, str(r.processes), *(digits(r.phases[p]) for p in SHARED_PHASES), *sent)
    return shown


def on_paper(papers: Sequence[Paper]) -> Table:
    """What the model says of more processes."""
    shown = Table(title="On paper: seconds of a step where every process has a batch like the one measured")
    for heading in ("optimizer", "processes", "a step", *papers[0].modelled):
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for p in papers:
        cells = [digits(sum(p.modelled.values())), *(digits(seconds) for seconds in p.modelled.values())]
        shown.add_row(p.optimizer, str(p.processes), *cells)
    machine = papers[0].machine
    shown.caption = f"{digits(machine.bandwidth / 1e9)} GB/s and {digits(machine.latency * 1e6)} microseconds a message"
    return shown


def as_json(results: Sequence[Result], papers: Sequence[Paper]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    found = outcome("scaling-out", results, threads_each=1, on_paper=[asdict(paper) for paper in papers])
    plain: dict[str, Any] = finite(found)  # alone, a message takes no time at all
    return plain

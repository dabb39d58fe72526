"""`rkfac bench memory`: bytes an optimizer keeps between steps, its peak beyond SGD's, and its checkpoint's size.

Every contestant trains in a process of its own, through the first steps of the step benchmark and one more refresh;
peaks are the largest resident set of such a process.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from rkfac_lab.bench.contestants import chosen, contestants
from rkfac_lab.bench.entrant import Entrant
from rkfac_lab.bench.holdings import checkpoint_size, held, nbytes, tensors
from rkfac_lab.bench.outcome import megabytes, outcome
from rkfac_lab.bench.problems import PROBLEMS, named
from rkfac_lab.errors import LabError

KINDS = ("buffers", "factors", "bases", "other")


@dataclass(frozen=True)
class Result:
    """Bytes of one contestant: parameters, kept between steps by kind, largest in the process, in a checkpoint."""

    problem: str
    optimizer: str
    parameters: int
    held: dict[str, int]
    peak: int
    checkpoint: int


def run(
    problems: Sequence[str], wanted: Sequence[str] = (), progress: Callable[[str], None] = lambda _: None
) -> list[Result]:
    """Measure the chosen contestants on problems of these names, one after the other."""
    results = []
    for name, problem in zip(problems, named(problems), strict=True):
        for optimizer in chosen(problem, wanted):
            progress(f"{problem.name}: {optimizer}")
            results.append(in_a_process_of_its_own(name, optimizer))
    return results


def in_a_process_of_its_own(problem: str, optimizer: str) -> Result:
    """The result of a process that measures nothing else."""
    # -P: a file lying in the working directory must not take a package's place.
    command = [sys.executable, "-P", "-m", __name__, problem, optimizer, str(torch.get_num_threads())]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise LabError(f"{optimizer} could not be measured on {problem}: {last}.")
    return Result(**json.loads(child.stdout.splitlines()[-1]))


def measure(name: str, optimizer: str) -> dict[str, Any]:
    """What a process of its own finds: the first steps of the step benchmark, then one more refresh."""
    problem = PROBLEMS[name]
    batches = problem.batches()
    entrant = Entrant(optimizer, contestants(problem)[optimizer], problem)
    for kind, number in [*problem.schedule(rounds=0)[0], ("refresh", 0), ("plain", 1)]:
        if kind in entrant.kinds:
            entrant.step(kind, batches[number % len(batches)])
    peak = peak_memory()
    kept = held(entrant.optimizer)
    entrant.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    parameters = nbytes(entrant.model.parameters())
    everything = nbytes(living())
    elsewhere = nbytes([*entrant.model.parameters(), *entrant.model.buffers(), *tensors(batches)])
    return {
        "problem": problem.name,
        "optimizer": optimizer,
        "parameters": parameters,
        "held": {**kept, "other": max(0, everything - elsewhere - sum(kept.values()))},
        "peak": peak,
        "checkpoint": checkpoint_size(entrant.optimizer),
    }


def living() -> Iterator[torch.Tensor]:
    """All tensors of the process that have memory of their own; sparse, fake and wrapped ones have none."""
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            continue
        try:
            thing.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            continue
        yield thing


def peak_memory() -> int:
    """The largest resident set of this process so far, in bytes."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            # getrusage would also count the process this one was forked from.
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(results: Sequence[Result]) -> Table:
    """Megabytes by kind; peaks beyond that of SGD's process."""
    shown = Table(title="Memory in MB")
    headings = ("optimizer", *KINDS, "held", "x parameters", "peak beyond SGD's", "checkpoint")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "optimizer" else "right", no_wrap=True)
    for problem in dict.fromkeys(result.problem for result in results):
        mine = [result for result in results if result.problem == problem]
        unit = next(result.peak for result in mine if result.optimizer == "SGD")
        shown.add_row(f"{problem} ({megabytes(mine[0].parameters)} MB of parameters)", style="italic")
        for r in mine:
            whole = sum(r.held.values())
            kinds = [megabytes(r.held[kind]) for kind in KINDS]
            beyond = "-" if r.optimizer == "SGD" else megabytes(r.peak - unit)
            row = (megabytes(whole), f"{whole / r.parameters:.2f}", beyond, megabytes(r.checkpoint))
            shown.add_row(r.optimizer, *kinds, *row)
        shown.add_section()
    shown.caption = (
        "between steps: buffers of the rule, running factors, decompositions, anything else; peak: resident set of a "
        "process that trains through refreshes, beyond that of SGD's"
    )
    return shown


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The measurements with what is needed to read them later."""
    return outcome("memory", results)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    print(json.dumps(measure(sys.argv[1], sys.argv[2])))

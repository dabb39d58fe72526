"""One contestant on its own copy of the model: steps of a wanted kind, timed by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn

from rkfac_lab.bench.contestants import Contestant
from rkfac_lab.bench.holdings import layers
from rkfac_lab.bench.problems import Problem
from rkfac_lab.bench.streams import Batch

PHASES = ("forward/backward", "statistics", "refresh", "application", "update")
BLOCK_PHASES = {"statistics": "statistics", "refresh": "refresh", "application": "apply"}
NEVER = 1 << 40


class Entrant:
    """A model, its optimizer, and the seconds of every step by kind of step and phase."""

    names: ClassVar[tuple[str, ...]] = PHASES

    def __init__(self, name: str, contestant: Contestant, problem: Problem) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = problem.build()
        self.optimizer = contestant.build(self.model)
        self.levers = contestant.levers
        self.kinds = ("plain", *contestant.levers)
        first = {kind: lever(self.optimizer)[0] for kind, lever in contestant.levers.items()}
        self.every: dict[str, int] = {kind: holder[key] for kind, (holder, key) in first.items()}
        self.forget()

    def forget(self) -> None:
        """Drop the measurements so far."""
        self.phases: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._ends: dict[str, list[int]] = {kind: [0] for kind in self.kinds}

    def end_round(self) -> None:
        """What was measured since the last round belongs together."""
        for kind, ends in self._ends.items():
            ends.append(len(self.seconds(kind)))

    def by_round(self, kind: str) -> list[list[float]]:
        """Seconds of whole steps, round by round."""
        seconds = self.seconds(kind)
        return [seconds[begin:end] for begin, end in pairwise(self._ends[kind])]

    def step(self, kind: str, batch: Batch) -> None:
        """One step of a kind; a refresh step collects statistics too."""
        for own, lever in self.levers.items():
            for holder, key in lever(self.optimizer):
                holder[key] = 1 if kind == "refresh" or own == kind else NEVER
        start = self._spent()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        cleared = time.perf_counter()
        logits = self.model(batch[0])
        nn.functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten()).backward()
        passed = time.perf_counter() - cleared
        middle = self._spent()  # part of the curvature's work is done inside of the backward pass
        again = time.perf_counter()
        self.between()
        self.optimizer.step()
        updating = time.perf_counter() - again + cleared - begin
        end = self._spent()
        seconds = {phase: end[phase] - start[phase] for phase in end}
        seconds["forward/backward"] = passed - sum(middle[phase] - start[phase] for phase in end)
        seconds["update"] = updating - sum(end[phase] - middle[phase] for phase in end)
        for phase in self.names:
            self.phases[kind][phase].append(seconds[phase])

    def between(self) -> None:
        """What comes after the backward pass and before the step: nothing, in one process."""

    def seconds(self, kind: str) -> list[float]:
        """Of whole steps."""
        return [sum(parts) for parts in zip(*self.phases[kind].values(), strict=True)]

    def _spent(self) -> dict[str, float]:
        """Seconds so far of the phases that somebody else counts: the blocks of curvature."""
        report = layers(self.optimizer)
        return {phase: sum(layer.seconds.get(own, 0.0) for layer in report) for phase, own in BLOCK_PHASES.items()}

"""One process's part of a contestant that trains in several: its share of every batch, and what it sends, in time and bytes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rkfac_lab.averaging import average_gradients
from rkfac_lab.bench.contestants import Contestant
from rkfac_lab.bench.entrant import PHASES, Entrant
from rkfac_lab.bench.problems import Problem
from rkfac_lab.bench.streams import Batch
from rkfac_lab.ranks import Ranks

SENT = ("gradients", "statistics", "decompositions")
EXCHANGES = {f"{what} sent": what for what in SENT}
SHARED_PHASES = (*PHASES, *EXCHANGES)


class Sharer(Entrant):
    """Seconds of exchange hold waiting for the slowest process; bytes are those that this one handed over."""

    names = SHARED_PHASES

    def __init__(self, name: str, contestant: Contestant, problem: Problem, together: Ranks) -> None:
        self.together = together
        self.waited: Counter[str] = Counter()
        self.bytes: list[tuple[str, dict[str, int]]] = []  # of each step, by what they were for
        super().__init__(name, contestant, problem)
        company = getattr(self.optimizer, "_company", None)
        self._world: Any = None if company is None else company.world
        if self._world is not None and not together.alone:
            self._world.exchanging = self._timed(self._world.exchanging)

    def forget(self) -> None:
        super().forget()
        self.bytes = []

    def step(self, kind: str, batch: Batch) -> None:
        share, _ = self.together.share(len(batch[0]))
        before = self._handed_over()
        super().step(kind, (batch[0][share], batch[1][share]))
        self.bytes.append((kind, {what: count - before[what] for what, count in self._handed_over().items()}))

    def between(self) -> None:
        begin = time.perf_counter()
        average_gradients(self.model, self.together)
        self.waited["gradients"] += time.perf_counter() - begin  # type: ignore[assignment]  # a sum of seconds

    def costs(self) -> list[float]:
        """Of decomposing each factor, as the optimizer shares them out."""
        blocks = getattr(self.optimizer, "_blocks", {}).values()
        return [float(factor.refresh_cost) for block in blocks for factor in block.factors.values()]

    def _handed_over(self) -> dict[str, int]:
        sent = {} if self._world is None or self.together.alone else self._world.sent
        gradients = 0 if self.together.alone else sum(p.nbytes for p in self.model.parameters())
        taken = sum(len(seconds["update"]) for seconds in self.phases.values())
        return {"gradients": gradients * taken, **{what: sent.get(what, 0) for what in SENT[1:]}}

    def _timed(self, exchanging: Callable[[str], AbstractContextManager[None]]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def timed(what: str) -> Iterator[None]:
            begin = time.perf_counter()
            with exchanging(what):
                yield
            kind = "decompositions" if what.startswith("decompositions") else "statistics"
            self.waited[kind] += time.perf_counter() - begin  # type: ignore[assignment]  # a sum of seconds

        return timed

    def _spent(self) -> dict[str, float]:
        return {**super()._spent(), **{phase: float(self.waited[what]) for phase, what in EXCHANGES.items()}}

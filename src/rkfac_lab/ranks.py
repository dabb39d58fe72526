"""The processes that torchrun started for one command: who is who, what the first tells the others, and who has failed.

All of them do the same things in the same order; what must be decided once (a clock, a folder, a file) the first process
decides and the others are told. A run that fails in all of them is an ordinary failure. A failure of one alone cannot be
mended, since the others wait for what it was about to say: it ends the command everywhere, and nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from .errors import LabError, one_line

T = TypeVar("T")
ALIKE = 30.0  # seconds within which processes that fail at the same point do so
LOOK = 0.02  # seconds between two looks at what the others have said
ABANDONED, LAST_WORD = "rkfac: abandoned", "rkfac: last word"


@dataclass(eq=False)
class Ranks:
    """This process's place among `size`; alone, every method is what one process would have done anyway.

    `local` is its number on this machine. `store` is where processes leave words that nobody has to wait for.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    store: Any = None
    failures: int = 0  # of all processes together, so far

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size}"

    @property
    def first(self) -> bool:
        """Whether it is the one that writes, decides and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    # --- decided once

    def from_first(self, action: Callable[[], T]) -> T:
        """What `action` gives in the first process, for everybody; an error there is one everywhere."""
        if self.alone:
            return action()
        said: list[Any] = [None]
        raised: Exception | None = None
        if self.first:
            try:
                said = [(action(), None)]
            except Exception as error:
                raised, said = error, [(None, one_line(error))]
        with self._exchanging("what the first of them decided"):
            distributed.broadcast_object_list(said, src=0)
        value, refusal = said[0]
        if raised is not None:
            raise raised
        if refusal is not None:
            raise LabError(refusal)
        found: T = value
        return found

    def by_first(self, action: Callable[[], T]) -> T | None:
        """Let the first process alone do something that stays with it; an error there is one everywhere."""
        kept: list[T] = []
        self.from_first(lambda: kept.append(action()))
        return kept[0] if kept else None

    # --- numbers of all

    def share(self, count: int) -> tuple[slice, float]:
        """This process's part of `count` things in their order, and how much it counts; all parts together count one.

        Where they do not divide, the first processes have one more; where there are fewer than processes, the last have none.
        """
        whole, over = divmod(count, self.size)
        begin, own = self.rank * whole + min(self.rank, over), whole + (self.rank < over)
        return slice(begin, begin + own), own / count

    def sums(self, *numbers: float) -> list[float]:
        """Over all processes, the same for everybody."""
        if self.alone:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        self.add_up(found, "losses and times")
        return found.tolist()

    def add_up(self, values: Tensor, what: str) -> None:
        """Let `values` be their sum over all processes."""
        if not self.alone:
            with self._exchanging(what):
                distributed.all_reduce(values)

    def follow_first(self, values: Tensor, what: str) -> None:
        """Let `values` be those of the first process."""
        if not self.alone:
            with self._exchanging(what):
                distributed.broadcast(values, src=0)

    @contextlib.contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        """Errors of torch's say which socket broke."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise LabError(
                f"{what} could not be exchanged, since another process has failed, was stopped or stayed away; "
                "start all of them again with --resume."
            ) from error

    # --- failures

    def failed_alike(self, error: BaseException) -> bool:
        """Whether all processes have failed here, so that they can go on together with whatever comes next."""
        if self.alone:
            return True
        self.failures += 1
        mine = f"rkfac: failure {self.failures} of {self.rank}"
        everybody = [f"rkfac: failure {self.failures} of {rank}" for rank in range(self.size)]
        try:
            self.store.set(mine, one_line(error))
            until = time.monotonic() + ALIKE
            while not self.store.check(everybody):
                if time.monotonic() > until or self.store.check([ABANDONED]):
                    self.store.set(ABANDONED, str(self))  # before this process is missed
                    return False
                time.sleep(LOOK)
            return not self.store.check([ABANDONED])
        except RuntimeError:  # whoever kept the words is gone as well
            return False

    def says_its_last_word(self) -> None:
        """The first process has said all that there is to say, and the others may go."""
        with contextlib.suppress(RuntimeError):
            self.store.set(LAST_WORD, str(self))

    def heard_the_last_word(self, seconds: float) -> bool:
        """Whether the first process has said what there is to say, waited for: who leaves early ends all under torchrun."""
        until = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.store.check([LAST_WORD]):
                if time.monotonic() > until:
                    return False
                time.sleep(LOOK)
            return True
        return False


ALONE = Ranks()
_here = ALONE


def here() -> Ranks:
    """The processes that this command runs in."""
    return _here


@contextlib.contextmanager
def among(found: Ranks) -> Iterator[None]:
    """Inside, this process is one of these."""
    global _here
    before, _here = _here, found
    try:
        yield
    finally:
        _here = before

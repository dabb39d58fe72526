"""Where random numbers come from: one seed a draw, so that one layer's draws say nothing about another's."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Randomness(ABC):
    """Hands out generators for named draws."""

    rank = 0  # of this process among those that train the same model
    seeded = True  # whether processes agree without talking to each other

    def local(self, *draw: str | int) -> torch.Generator:
        """The same for a draw from what this process alone has: others draw other numbers."""
        return self.generator(*draw, *([f"process {self.rank}"] if self.rank else []))

    @abstractmethod
    def generator(self, *draw: str | int) -> torch.Generator:
        """The generator for one draw, named by what it is for: a layer, a side, a refresh number."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


def subset(n: int, m: int, generator: torch.Generator) -> torch.Tensor:
    """m of the numbers below n without replacement, every choice as likely as another; ascending, so that reading is local.

    A few of many are picked from the distinct values of 2 m independent draws, which by symmetry prefer no value:
    shuffling all n would take longer than what the numbers are drawn for.
    """
    device = generator.device
    found = torch.arange(n if n < 4 * m else 0, device=device)
    while len(found) < m:
        found = torch.randint(n, (2 * m,), generator=generator, device=device).unique()
    chosen = torch.randperm(len(found), generator=generator, device=device)[:m]
    return found[chosen.sort()[0]]


@contextmanager
def repeated(generator: torch.Generator, devices: Iterable[torch.device]) -> Iterator[Callable[[], None]]:
    """Torch's own random numbers (dropout) begin anew, and alike, whenever the function that this gives is called.

    Afterwards they go on as if nothing had been drawn.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    state = torch.Generator().manual_seed(seed).get_state()

    def again() -> None:
        torch.set_rng_state(state)  # torch.manual_seed would wake devices that nobody uses
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)

    with torch.random.fork_rng(devices=cards):
        yield again


class Seeded(Randomness):
    """A seed of its own for every draw, made from the optimizer's seed and the draw's name.

    Leaving a layer out, another rank or another order of the layers changes no other layer's draw, and all processes
    agree without talking to each other.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, *draw: str | int) -> torch.Generator:
        """Freshly seeded, on the CPU: one seed gives one draw on every device."""
        text = "\x1f".join(map(str, (self.seed, *draw)))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))

    def state_dict(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The seed of the saved run."""
        if not isinstance(state.get("seed"), int):
            raise ValueError("it was saved with a generator, this optimizer was built with a seed")
        self.seed = state["seed"]


class Shared(Randomness):
    """One generator of the caller's, used by all draws in the order they happen."""

    seeded = False

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def generator(self, *draw: str | int) -> torch.Generator:
        """Always the same."""
        return self._generator

    def state_dict(self) -> dict[str, Any]:
        """How far it was used."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As far as the saved run had used it."""
        if not isinstance(state.get("generator"), torch.Tensor):
            raise ValueError("it was saved with a seed, this optimizer was built with a generator")
        self._generator.set_state(state["generator"].cpu())

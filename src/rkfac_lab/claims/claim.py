"""A claim of the paper's: how it is measured, what became of it, and the page that says so.

Measuring takes minutes to hours and ends in plain values, which go to a JSON file. Verdict, page and pictures are made from
those values alone, so that nobody can write a number on a page that was not measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from matplotlib.figure import Figure

from rkfac_lab.claims.desk import Desk

Found = Mapping[str, Any]  # what a measurement came to, as JSON has it

HOLDS, PARTLY, FAILS, OPEN = "holds", "holds partly", "does not hold", "open"


class Verdict(NamedTuple):
    """What became of a claim, in one word, and why, in one sentence; `measured`: on what."""

    word: str
    measured: str
    why: str


@dataclass(frozen=True)
class Claim(ABC):
    """The fields of a claim are the sizes of its measurement; all of them go to its file."""

    name: ClassVar[str]
    title: ClassVar[str]
    says: ClassVar[str]  # the paper, in few words

    @abstractmethod
    def measure(self, desk: Desk) -> dict[str, Any]:
        """All that is long; what has been done before is not done again."""

    @abstractmethod
    def verdict(self, found: Found) -> Verdict:
        """Decided by rules that are written down here, before anything is measured."""

    @abstractmethod
    def rule(self, found: Found) -> str:
        """By which rule the word was found, for who reads the page; what was mended after figures were known is said there."""

    @abstractmethod
    def page(self, found: Found) -> str:
        """The body of the page in Markdown; pictures stand there by the names that `pictures` gives them."""

    @abstractmethod
    def pictures(self, found: Found) -> dict[str, Figure]:
        """By name."""

    @abstractmethod
    def small(self) -> Claim:
        """The same on embedded data within about a minute: to try it out, and no evidence for anything."""

"""What a comparison was told: its options, as its folder keeps them, and which of them may change when it goes on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rkfac_lab import tuning
from rkfac_lab.comparison import Comparison
from rkfac_lab.errors import LabError
from rkfac_lab.tuning import Search
from rkfac_lab.workloads import find

FREE = ("data_dir", "reference")  # they change no number of a run
GROWING = ("seeds", "time_budget")  # what was done stays, and more is added


@dataclass(frozen=True)
class Plan:
    """The options of `rkfac compare`, by their names; None and nothing: not given."""

    workload: str = "digits-mlp"
    optimizers: list[str] = field(default_factory=list)  # none: the workload's
    seeds: int = 3
    epochs: int | None = None
    time_budget: float | None = None
    data_dir: str | None = None
    tune: bool = False
    grid: list[float] = field(default_factory=list)
    tune_epochs: int | None = None
    tuned: str | None = None
    reference: str | None = None
    set: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        comparison: Comparison,
        search: Search | None = None,
        tuned: Path | None = None,
        reference: str | None = None,
    ) -> Plan:
        """With everything that was chosen by itself written out."""
        return cls(
            comparison.workload,
            list(comparison.contenders),
            comparison.seeds,
            **{key: comparison.common.get(key) for key in ("epochs", "time_budget", "data_dir")},
            tune=search is not None,
            grid=list(search.rates) if search else [],
            tune_epochs=search.epochs if search else None,
            tuned=None if tuned is None else str(tuned),
            reference=reference,
            set=list(comparison.settings),
        )

    def comparison(self) -> Comparison:
        """What is compared."""
        chosen = tuple(self.optimizers) or find(self.workload).compared
        common = {"epochs": self.epochs, "time_budget": self.time_budget, "data_dir": self.data_dir}
        return Comparison(self.workload, chosen, self.seeds, tuple(self.set), common)

    def search(self) -> Search | None:
        """The trials before it, if there are any."""
        if not self.tune and not self.grid:
            return None
        if self.tuned:
            raise LabError("--tune chooses now what --tuned has chosen before; leave one of the two away.")
        return tuning.in_passing(self.comparison(), self.grid, self.tune_epochs)

    def command(self) -> str:
        """The command that says all of it."""
        words = ["rkfac", "compare", self.workload]
        for key, value in asdict(self).items():
            if key not in ("workload", "set") and value not in (None, False, []):
                words += [_option(key)] if value is True else [_option(key), _said(value)]
        for text in self.set:
            words += ["--set", text]
        return shlex.join(words)


def continued(before: Plan, given: Mapping[str, Any], folder: Path) -> Plan:
    """What was begun in `folder`, with the options `given` now; refused where that would be another comparison."""
    now = replace(before, **given)
    require_same(before, now, folder)
    return now


def require_same(before: Plan, now: Plan, folder: Path) -> None:
    """Refuse, before anything is written, what would mix two comparisons or take something from the one that is there."""
    old, new = asdict(before), asdict(now)
    other = [key for key in new if key not in FREE and not _goes_on(key, old[key], new[key])]
    if other:
        what = ", ".join(f"{_option(key)} {_said(new[key])}, not {_said(old[key])}" for key in other)
        raise LabError(
            f"{folder} holds another comparison (different: {what}); leave these options away to continue it, or name "
            "another folder with --out."
        )


def _goes_on(key: str, old: Any, new: Any) -> bool:
    if key in GROWING:
        return old == new or new is None or (old is not None and new >= old)
    return bool(sorted(old) == sorted(new) if key == "optimizers" else old == new)


def _option(key: str) -> str:
    return "workload" if key == "workload" else f"--{key.replace('_', '-')}"


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)

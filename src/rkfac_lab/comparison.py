"""The plan of a comparison: from a workload and some names to the configurations of all runs, in their order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkfac_lab import config as configuration
from rkfac_lab.config import RunConfig
from rkfac_lab.errors import LabError
from rkfac_lab.jobs import Job

LONGEST_SLUG = 100  # file systems take 255 bytes; the workload and the seed need some of them


@dataclass(frozen=True)
class Comparison:
    """What is compared: the workload, the contenders and what all of them are given alike.

    A contender is an optimizer's name, or a shipped configuration or TOML file such as `paper-rs-kfac`. `settings`
    are `key=value` texts as for `rkfac train --set`; `rs-kfac.rank=50` sets an argument of one contender only.
    """

    workload: str = "digits-mlp"
    contenders: tuple[str, ...] = ("rs-kfac", "sre-kfac", "k-fac", "sgd", "adamw")
    seeds: int = 3
    settings: tuple[str, ...] = ()
    common: Mapping[str, Any] = field(default_factory=dict)  # values of RunConfig's keys; None is unset

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        if not self.contenders:
            raise LabError("There is nothing to compare; name optimizers with --optimizers rs-kfac,k-fac,sgd.")
        twice = sorted({name for name in self.contenders if self.contenders.count(name) > 1})
        if twice:
            raise LabError(f"{', '.join(twice)} is named twice in --optimizers; name each optimizer once.")
        folders = [slug(name) for name in self.contenders]
        if len(set(folders)) < len(folders):
            raise LabError("Two contenders in --optimizers would share a run folder; rename one of the files.")
        if self.seeds < 1:
            raise LabError(f"--seeds is the number of runs of each optimizer and must be at least 1, not {self.seeds}.")

    def config(
        self, contender: str, seed: int, arguments: Mapping[str, Any] | None = None, **special: Any
    ) -> RunConfig:
        """The configuration of one contender's run; `special` keys and `arguments` go over everything else."""
        values = self._base(contender)
        values.update({key: value for key, value in self.common.items() if value is not None})
        for text in self.settings:
            mine, other = self._addressed(text, contender)
            if mine:
                configuration.override(values, mine)
            elif not other:
                configuration.override(values, text)
        values.update(special, seed=seed)
        values["optimizer"].setdefault("arguments", {}).update(arguments or {})
        return configuration.from_dict(values)

    def _base(self, contender: str) -> dict[str, Any]:
        if contender not in configuration.shipped() and not contender.endswith(".toml"):
            return {"workload": self.workload, "optimizer": {"name": contender}}
        values = configuration.load(contender, workload=self.workload).to_dict()
        if values["workload"] != self.workload:
            raise LabError(
                f"{contender} is for the workload {values['workload']}, not for {self.workload}; compare there."
            )
        values["label"] = values["label"] or Path(contender).name.removesuffix(".toml")
        return values

    def _addressed(self, text: str, contender: str) -> tuple[str | None, bool]:
        """`text` as a setting of this contender, if it begins with its name; and whether it is another's."""
        if text.startswith(f"{contender}."):
            return f"optimizer.arguments.{text.removeprefix(f'{contender}.')}", False
        return None, any(text.startswith(f"{name}.") for name in self.contenders)

    def jobs(self, folder: Path, arguments: Mapping[str, Mapping[str, Any]] | None = None) -> list[Job]:
        """The runs in their order: every contender with the first seed, then every one with the second..."""
        chosen = arguments or {}
        return [
            Job(self.config(name, seed, chosen.get(name)), folder / f"{slug(name)}-seed{seed}")
            for seed in range(self.seeds)
            for name in self.contenders
        ]


def slug(name: str) -> str:
    """A contender's name or a label as a part of the name of a folder, which it cannot leave."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", Path(name).name.removesuffix(".toml"))[:LONGEST_SLUG]

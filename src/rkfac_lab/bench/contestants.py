"""Who takes part: torch's SGD as the unit, AdamW, rkfac's optimizers, and peers from pytorch-optimizer.

A contestant whose steps are not all alike has a lever for each kind of step that comes once in a period: the places
where the period is written, so that a benchmark can bring such a step about or keep it away.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rkfac
from rkfac_lab.bench.problems import Problem
from rkfac_lab.errors import LabError
from rkfac_lab.muon import muon

Place = tuple[MutableMapping[str, Any], str]
Lever = Callable[[Optimizer], list[Place]]


def _in_groups(key: str) -> Lever:
    return lambda optimizer: [(group, key) for group in optimizer.param_groups]


def _in_soap(optimizer: Optimizer) -> list[Place]:
    return [(holder, "precondition_frequency") for holder in (*optimizer.param_groups, *optimizer.state.values())]


def _in_shampoo(optimizer: Optimizer) -> list[Place]:
    return [(vars(optimizer), "preconditioning_compute_steps")]


@dataclass(frozen=True)
class Contestant:
    """How to build an optimizer for a model, and its levers by kind of step."""

    build: Callable[[nn.Module], Optimizer]
    levers: Mapping[str, Lever] = field(default_factory=dict)
    only_if_asked: bool = True


def contestants(problem: Problem) -> dict[str, Contestant]:
    """Everybody who can take part in a problem."""
    return {
        "SGD": Contestant(lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), only_if_asked=False),
        "AdamW": Contestant(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), only_if_asked=False),
        "SOAP": Contestant(partial(_peer, "SOAP"), {"refresh": _in_soap}),
        "Muon": Contestant(lambda m: muon(m, lr=1e-4)),
        "Shampoo": Contestant(partial(_peer, "Shampoo"), {"refresh": _in_shampoo}),
        **{name: _second_order(name, *choice, problem.kfac) for name, choice in _choices(problem).items()},
    }


def _peer(name: str, model: nn.Module) -> Optimizer:
    import pytorch_optimizer

    built: Optimizer = getattr(pytorch_optimizer, name)(model.parameters(), lr=1e-4)
    return built


def _choices(problem: Problem) -> dict[str, tuple[type[rkfac.KFAC], dict[str, Any]]]:
    """rkfac's optimizers by name: class and arguments."""
    paper = rkfac.paper_defaults()
    default = {"eager_start": False}  # what is measured is the training after its first steps
    choices: dict[str, tuple[type[rkfac.KFAC], dict[str, Any]]] = {
        "RS-KFAC (default)": (rkfac.RSKFAC, default),
        "RS-KFAC (paper)": (rkfac.RSKFAC, paper),
        "SRE-KFAC (paper)": (rkfac.SREKFAC, paper),
        "K-FAC (paper)": (rkfac.KFAC, paper),
        "B-KFAC (default)": (rkfac.BKFAC, default),
        "B-KFAC (paper)": (rkfac.BKFAC, paper),
        "SENG (paper)": (rkfac.SENG, rkfac.seng_defaults()),
        "SENG (paper, exact product)": (rkfac.SENG, {**rkfac.seng_defaults(), "product": "exact"}),
    }
    if "apply" in inspect.signature(rkfac.KFAC).parameters:
        choices["RS-KFAC (default, backward)"] = (rkfac.RSKFAC, {**default, "apply": "backward"})
        choices["RS-KFAC (paper, backward)"] = (rkfac.RSKFAC, {**paper, "apply": "backward"})
    if "loss_average" in problem.kfac:  # where people train with AdamW
        choices["RS-KFAC (default, AdamW's length)"] = (rkfac.RSKFAC, {**default, "graft": "adamw"})
    return choices


def _second_order(
    name: str, kind: type[rkfac.KFAC], arguments: Mapping[str, Any], problem: Mapping[str, Any]
) -> Contestant:
    asked = {key: value for key, value in problem.items() if key not in kind.lacks}
    levers = {"statistics": "factor_every", "refresh": "inverse_every"}  # of some only the second is there
    return Contestant(
        lambda model: kind(model, **{**arguments, **asked, "lr": 1e-4}),
        {step: _in_groups(key) for step, key in levers.items() if key not in kind.lacks},
        only_if_asked=not name.startswith("RS-KFAC"),
    )


def chosen(problem: Problem, wanted: Sequence[str] = ()) -> dict[str, Contestant]:
    """SGD and those whose names contain one of the wanted words; without any SGD, AdamW and the RS-KFACs."""
    everyone = contestants(problem)
    for word in wanted:
        if not any(word in name for name in everyone):
            raise LabError(f"No contestant's name contains {word!r}; there are {_listed(everyone)}.")

    def takes_part(name: str) -> bool:
        return any(word in name for word in wanted) if wanted else not everyone[name].only_if_asked

    return {name: entry for name, entry in everyone.items() if name == "SGD" or takes_part(name)}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)

"""Factors and gradients of a few layers at a few steps of one training, and the steps that K-FAC would make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import rkfac
from rkfac.layers import KroneckerAdapter, adapter_for
from rkfac.linalg import LowRank
from rkfac.optim.owner import model_of
from rkfac_lab import disk, train
from rkfac_lab.claims import paper
from rkfac_lab.claims.desk import Desk
from rkfac_lab.comparison import slug
from rkfac_lab.config import RunConfig, from_dict
from rkfac_lab.errors import LabError

YOUNG, OLD = "with the identity", "without the identity"  # in the averages


class Subject(NamedTuple):
    """A workload and where to look at it: layers by name, after so many steps.

    `widest` is what the paper's 512 channels are here; `every` the steps between statistics, fewer than the paper's 10, so
    that the identity which the averages start from has faded at the end of a short training as it has in a long one.
    """

    workload: str
    widest: int
    lr: float
    every: int
    layers: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The paper's, in proportion."""
        return paper.rank_at(self.widest)

    def run(self, **arguments: Any) -> RunConfig:
        """RS-KFAC with the paper's settings but for these, as long as there is something to look at."""
        given = {"lr": self.lr, "factor_every": self.every, "rank": self.rank, **arguments}
        last = max(self.steps)
        return paper.run(self.workload, "rs-kfac", given, epochs=last, max_steps=last, evaluate_steps=0)


class Captured(NamedTuple):
    """One layer after `step` steps, in float64: its factors, its gradient (d_G, d_A), and how much identity is in the factors."""

    workload: str
    layer: str
    step: int
    A: Tensor
    G: Tensor
    J: Tensor
    remnant: float

    def free(self) -> Captured:
        """With the identity taken out of both factors: as they would be after a training so long that it is gone."""
        gone = [X - self.remnant * torch.eye(len(X), dtype=X.dtype) for X in (self.A, self.G)]
        return self._replace(A=gone[0], G=gone[1], remnant=0.0)


def captured(desk: Desk, subject: Subject) -> list[Captured]:
    """What the training shows, layer by layer; trained once, and continued where it was stopped."""
    folder = desk.folder / "captured" / slug(subject.workload)
    if not all(_path(folder, step).is_file() for step in subject.steps):
        desk.say(f"factors of {subject.workload}, {max(subject.steps)} steps")
        _train(desk, subject, folder)
    return [found for step in subject.steps for found in _read(folder, subject, step)]


def _train(desk: Desk, subject: Subject, folder: Path) -> None:
    placed = {**subject.run().to_dict(), "threads": desk.threads, "data_dir": desk.data_dir}
    handle = register_optimizer_step_post_hook(Watcher(folder, subject.layers, subject.steps))
    try:
        run = train.run(from_dict(placed), folder / "run", resume=True)
    finally:
        handle.remove()
    missing = [step for step in subject.steps if not _path(folder, step).is_file()]
    if missing:
        status = run.summary["status"]
        raise LabError(f"The training in {folder} is {status} and step {missing[0]} was not kept; delete the folder.")


class Watcher:
    """Called after every optimizer step; writes the chosen layers down at the chosen steps."""

    def __init__(self, folder: Path, layers: Sequence[str], steps: Sequence[int]) -> None:
        self.folder, self.layers, self.steps = folder, layers, set(steps)
        self.step: int | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The shape of torch's hooks; optimizers without factors are none of our business."""
        if not isinstance(optimizer, rkfac.KFAC):
            return
        # A training that goes on from a checkpoint has steps behind it that nobody here has seen.
        self.step = optimizer.report().steps if self.step is None else self.step + 1
        if self.step in self.steps:
            disk.make_folder(self.folder)
            path = _path(self.folder, self.step)
            disk.write_atomically(path, lambda file: torch.save(look(optimizer, self.layers), file))


def look(optimizer: rkfac.KFAC, layers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each layer: its two averages, its gradient, and the share of the identity that is left in the averages."""
    model, _ = model_of(optimizer.param_groups, None)
    modules = dict(model.named_modules())
    updates = {record.name: record.updates for record in optimizer.report() if record.covered}
    decay = float(optimizer.param_groups[0]["factor_decay"])
    found = {}
    for name in layers:
        if name not in updates:
            raise LabError(f"There is no preconditioned layer '{name}'; choose from {', '.join(updates)}.")
        factors = optimizer.factors(name)
        found[name] = {
            "A": factors.input,
            "G": factors.output,
            "J": gradient(modules[name]),
            "remnant": decay ** updates[name],
        }
    return found


def gradient(module: nn.Module) -> Tensor:
    """The gradient of a layer as the matrix (d_G, d_A) that its factors belong to, the bias as the last column."""
    adapter = adapter_for(module)
    if not isinstance(adapter, KroneckerAdapter):
        raise LabError(f"The gradient of a {type(module).__name__} is not one matrix; choose another layer.")
    bias = adapter.bias(module)
    parameters = [adapter.weight(module), *([] if bias is None else [bias])]
    tensors = [p.grad for p in parameters if p.grad is not None]
    if len(tensors) < len(parameters):
        raise LabError(f"A {type(module).__name__} got no gradient; choose another layer.")
    return adapter.joined(module, tensors, torch.float64)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"


def _read(folder: Path, subject: Subject, step: int) -> list[Captured]:
    kept = torch.load(_path(folder, step), weights_only=True)
    if set(kept) != set(subject.layers):
        raise LabError(f"{folder} holds other layers than those asked for; delete it.")
    return [Captured(subject.workload, name, step, **kept[name]) for name in subject.layers]


def step_of(G: LowRank, A: LowRank, J: Tensor, share: float) -> Tensor:
    """(G + l_G)^-1 J (A + l_A)^-1, each damped by `share` of its own largest eigenvalue: the paper's equation."""
    halfway = G.solve(J, share * G.largest)
    return A.solve(halfway, share * A.largest, side="right")


def apart(step: Tensor, truth: Tensor) -> tuple[float, float]:
    """||step - truth|| / ||truth||, and the cosine of the angle between them."""
    size, length = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(step))
    if not (size > 0 and length > 0):  # JSON has no NaN, and two steps that are nothing are the same step
        return (0.0, 1.0) if size == length else (1.0, 0.0)
    cosine = float((step / length * (truth / size)).sum())
    return float(torch.linalg.vector_norm(step - truth)) / size, min(1.0, cosine)


def rounded(value: float) -> float:
    """Four digits are more than a table shows and keep the file small."""
    return float(f"{value:.4g}")

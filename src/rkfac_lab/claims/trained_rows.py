"""Rows that a running average is made of: those of a trained network's layers at the weights where it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rkfac.layers import KroneckerAdapter, adapter_for
from rkfac_lab.claims.widths import Walk
from rkfac_lab.errors import LabError
from rkfac_lab.plots import SIDES

LEFT = 0.01  # of an average, when it is looked at: so many updates that rho to their number is below
AT_ONCE = 4096  # samples whose rows are made together, and rows that are multiplied together


class Training(NamedTuple):
    """What is trained, and how long; `samples`: whose rows are looked at afterwards, the first so many (None: all)."""

    family: str
    width: int
    steps: int
    batch: int
    lr: float
    decay: float
    layers: tuple[str, ...]
    samples: int | None = None


class Network:
    """A network behind its last step; trained when it is asked for, so that nothing is where a measurement goes on."""

    def __init__(self, training: Training, data_dir: str | None) -> None:
        self.training, self.data_dir = training, data_dir
        self.layers = [Layer(self, name) for name in training.layers]

    @cached_property
    def walk(self) -> Walk:
        """Behind its last step."""
        return self._trained[0]

    @cached_property
    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Eigenvalues of what training left behind, by layer and side."""
        return self._trained[1]

    @cached_property
    def _trained(self) -> tuple[Walk, dict[str, dict[str, Tensor]]]:
        own = self.training
        walk = Walk(own.family, own.width, self.data_dir, own.batch, own.lr)
        watcher = walk.watch(own.layers, own.decay)
        for _ in range(own.steps):
            walk.step()
        spectra = {name: watcher.spectrum(name) for name in own.layers}
        walk.close()
        return walk, {name: {"input": one.input, "output": one.output} for name, one in spectra.items()}


class Layer:
    """One of its layers: rows by sample, their second moment, and how many independent rows a sample is worth."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """(samples, positions, d) by side: inputs with the bias's one, and gradients of a sample's own loss by the output."""
        walk = self.network.walk
        module = walk.model.get_submodule(self.name)
        adapter = adapter_for(module)
        if not isinstance(adapter, KroneckerAdapter):
            raise LabError(f"A {type(module).__name__} has no rows; choose another layer than '{self.name}'.")
        kept: dict[str, list[Tensor]] = {side: [] for side in SIDES}

        def keep(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            def then(gradient: Tensor) -> None:
                g = len(gradient) * gradient
                pair = adapter.by_sample(layer, inputs[0].detach(), g, adapter.has_bias(layer), "expand")
                for side, rows in zip(SIDES, pair, strict=True):
                    kept[side].append(rows)

            output.register_hook(then)

        handle = module.register_forward_hook(keep)
        wanted = slice(self.network.training.samples)
        x, y = walk.data.train_x[wanted], walk.data.train_y[wanted]
        for some, their in zip(x.split(AT_ONCE), y.split(AT_ONCE), strict=True):
            inputs, targets = walk.problem.prepare(some, their)
            walk.problem.loss(walk.model(inputs), targets).backward()
        handle.remove()
        return {side: torch.cat(parts) for side, parts in kept.items()}

    @property
    def positions(self) -> int:
        """Rows of a sample."""
        return int(self.rows["input"].shape[1])

    @cached_property
    def covariances(self) -> dict[str, Tensor]:
        """Eigenvalues of C, descending."""
        return {side: eigenvalues(_moment(rows.flatten(0, 1))) for side, rows in self.rows.items()}

    @cached_property
    def worth(self) -> dict[str, float]:
        """So many independent normal rows of the same C make a moment that varies as much as one sample's."""
        return {side: worth(rows, self.covariances[side]) for side, rows in self.rows.items()}

    def draw(self, side: str, samples: int, generator: torch.Generator) -> Callable[[], Tensor]:
        """Batches of samples with replacement, so that these are independent and their second moment is C exactly."""
        rows = self.rows[side]
        return lambda: rows[torch.randint(len(rows), (samples,), generator=generator)].flatten(0, 1)


def worth(rows: Tensor, covariance: Tensor) -> float:
    """(tr(C)^2 + ||C||^2) / (mean ||M||^2 - ||C||^2) with M the moment of one sample's rows.

    The moment of n independent normal rows is off C by (tr(C)^2 + ||C||^2) / n in the mean of squares, that of one sample by
    mean ||M||^2 - ||C||^2: unequal lengths make a sample worth less than its rows, and so does likeness of its positions.
    """
    total = 0.0
    for part in rows.split(max(1, AT_ONCE // rows.shape[1])):
        likeness = (part.double() @ part.double().mT) / rows.shape[1]
        total += float(likeness.square().sum())
    square = float(covariance.square().sum())
    return (float(covariance.sum()) ** 2 + square) / (total / len(rows) - square)


def updates(rho: float) -> int:
    """After so many the first batch has lost its weight but for a hundredth."""
    return math.ceil(math.log(LEFT) / math.log(rho))


def averaged(draw: Callable[[], Tensor], rho: float, count: int) -> Tensor:
    """Eigenvalues, descending, of the running average of `count` batches, free of its start."""
    total = torch.zeros(())
    for _ in range(count):
        rows = draw()
        total = rho * total + (1 - rho) / len(rows) * (rows.T @ rows)
    return eigenvalues(total.double() / (1 - rho**count))


def eigenvalues(matrix: Tensor) -> Tensor:
    """Descending, none below zero."""
    return torch.linalg.eigvalsh(matrix).flip(0).clamp_min(0)


def _moment(rows: Tensor) -> Tensor:
    """In float64, some rows at once."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(AT_ONCE):
        total += part.double().T @ part.double()
    return total / len(rows)

"""A part of the training data kept apart, so that settings can be chosen without looking at the test set."""

from __future__ import annotations

import dataclasses

import torch

from .data import Dataset, Sources
from .workloads import Workload

NAME = "validation"


def held_out(workload: Workload, share: float) -> Workload:
    """`workload` without its test set: trained on less, and measured on the part kept apart; itself if `share` is 0."""
    if not share:
        return workload

    def data(sources: Sources) -> Dataset:
        return split(workload.data(sources), share)

    return dataclasses.replace(
        workload,
        data=data,
        measured_on=NAME,
        metrics={_renamed(name): metric for name, metric in workload.metrics.items()},
        targets=tuple(dataclasses.replace(target, metric=_renamed(target.metric)) for target in workload.targets),
    )


def split(data: Dataset, share: float) -> Dataset:
    """The training samples in two parts, the same two in every run: nobody's luck with the split decides."""
    order = torch.arange(len(data.train_x) - 1, -1, -1)
    if not data.ordered:
        order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))
    cut = max(1, round(share * len(order)))
    apart, rest = order[:cut], order[cut:]
    return dataclasses.replace(
        data,
        train_x=data.train_x[rest],
        train_y=data.train_y[rest],
        test_x=data.train_x[apart],
        test_y=data.train_y[apart],
    )


def _renamed(metric: str) -> str:
    return f"{NAME}_{metric.removeprefix('test_')}"

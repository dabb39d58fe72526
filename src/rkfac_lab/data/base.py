"""What a dataset is, and where its files are looked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import LabError


@dataclass(frozen=True)
class Dataset:
    """Training and test tensors, first axis the samples, as stored (images stay uint8 until a batch is made)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int  # number of labels, or size of the vocabulary
    ordered: bool = False  # the samples are pieces of one sequence: what is kept apart is its end


@dataclass(frozen=True)
class Sources:
    """What the user said about where data is; None means the usual places."""

    data_dir: str | None = None
    text_file: str | None = None


def folders(sources: Sources) -> list[Path]:
    """Data folders in the order they are searched; an explicit --data-dir is the only one."""
    if sources.data_dir:
        return [Path(sources.data_dir)]
    named = os.environ.get("RKFAC_DATA")
    return [*([Path(named)] if named else []), Path("data")]


def missing(what: str, looked: list[Path], dataset: str) -> LabError:
    """The one sentence for a file that is not there."""
    places = ", ".join(str(place) for place in looked)
    return LabError(
        f"{what} is missing: looked in {places}; get it with `rkfac data get {dataset}` "
        "or name the folder that has it with --data-dir."
    )


def damaged(path: Path, why: str, dataset: str) -> LabError:
    """The one sentence for a file that cannot be what it should be."""
    return LabError(f"{path} is damaged ({why}); delete it and get it again with `rkfac data get {dataset}`.")

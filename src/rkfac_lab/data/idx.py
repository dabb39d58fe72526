"""IDX files, gzipped or plain: the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import disk
from .base import Dataset, Sources, damaged, folders, missing

NAME = "fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTE = 8
SIDE = 28
LARGEST = 1 << 28  # bytes of one file's data; the largest real one has 47 million


def read_idx(path: Path, dataset: str = NAME) -> Tensor:
    """The uint8 tensor stored in an IDX file; damaged files are refused in one sentence, none is unpacked beyond its size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return _read_tensor(path, file, dataset)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, f"its gzip stream cannot be read: {error}", dataset) from error
    except OSError as error:
        raise disk.sentence(path, "read", error) from error


def _read_tensor(path: Path, file: BinaryIO | gzip.GzipFile, dataset: str) -> Tensor:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0":
        raise damaged(path, "it does not begin as an IDX file does", dataset)
    kind, axes = start[2], start[3]
    if kind != UNSIGNED_BYTE:
        raise damaged(path, f"element type {kind:#04x} instead of unsigned bytes", dataset)
    sizes = file.read(4 * axes)
    if len(sizes) < 4 * axes:
        raise damaged(path, "its header is cut short", dataset)
    shape = struct.unpack(f">{axes}I", sizes)
    expected = math.prod(shape)
    if not 0 < expected <= LARGEST:
        raise damaged(path, f"{expected} bytes of data announced, where 1 to {LARGEST} are possible", dataset)
    content = file.read(expected + 1)  # a stream that goes on is not unpacked to its end
    if len(content) != expected:
        found = str(len(content)) if len(content) < expected else f"more than {expected}"
        raise damaged(path, f"{found} bytes of data instead of {expected}", dataset)
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(shape).copy())


def _find(stem: str, places: list[Path]) -> Path | None:
    for place in places:
        for path in (place / f"{stem}.gz", place / stem):
            if path.is_file():
                return path
    return None


def places(sources: Sources) -> list[Path]:
    """Where Fashion-MNIST's four files may be."""
    found = [place for folder in folders(sources) for place in (folder / NAME, folder)]
    return found if sources.data_dir else [*found, DEBIAN]


def fashion_mnist(sources: Sources) -> Dataset:
    """Fashion-MNIST: images (n, 28, 28) uint8, labels int64."""
    looked = places(sources)
    tensors: list[Tensor] = []
    for stem in STEMS:
        path = _find(stem, looked)
        if path is None:
            raise missing(f"Fashion-MNIST's {stem}(.gz)", looked, NAME)
        tensor = read_idx(path)
        wanted = 3 if "images" in stem else 1
        if tensor.dim() != wanted:
            raise damaged(path, f"{tensor.dim()} axes instead of {wanted}", NAME)
        if wanted == 3 and tensor.shape[1:] != (SIDE, SIDE):
            raise damaged(path, f"images of {tuple(tensor.shape[1:])} pixels instead of {SIDE} by {SIDE}", NAME)
        if tensors and wanted == 1 and len(tensor) != len(tensors[-1]):
            raise damaged(path, f"{len(tensor)} labels for {len(tensors[-1])} images", NAME)
        if wanted == 1 and tensor.numel() and int(tensor.max()) > 9:
            raise damaged(path, f"label {int(tensor.max())} where 0..9 are possible", NAME)
        tensors.append(tensor)
    train_x, train_y, test_x, test_y = tensors
    return Dataset(train_x, train_y.long(), test_x, test_y.long(), classes=10)

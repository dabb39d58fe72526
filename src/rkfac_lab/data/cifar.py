"""CIFAR-10 in its official binary and python layouts; pickles are read without executing anything."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import disk
from ..errors import LabError
from .base import Dataset, Sources, damaged, folders, missing

NAME = "cifar10"
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
LARGEST = 1 << 28  # bytes of one batch; the real ones have 31 million
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"


class _Stored:
    """Stands for a numpy array or dtype while unpickling: keeps what the file says, runs none of numpy's code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _latin1(text: str, encoding: str) -> bytes:
    """`_codecs.encode` as Python 3 writes bytes into old pickles, and nothing more."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


class _CifarUnpickler(pickle.Unpickler):
    """Knows the few names a CIFAR-10 batch needs and refuses all others."""

    ALLOWED = {  # noqa: RUF012  (a constant table)
        ("numpy.core.multiarray", "_reconstruct"): _Stored,
        ("numpy._core.multiarray", "_reconstruct"): _Stored,
        ("numpy", "ndarray"): _Stored,
        ("numpy", "dtype"): _Stored,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise LabError(f"asks for {module}.{name}") from None


def _array(stored: Any) -> np.ndarray[Any, Any]:
    """The uint8 array whose parts the unpickler kept."""
    _, shape, dtype, fortran, content = stored.state
    if dtype.arguments[0] not in ("u1", b"u1") or fortran or len(content) != math.prod(shape):
        raise ValueError("the pixels are not a plain array of bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels int64 of one batch of the python layout."""
    content = disk.read(path, LARGEST)
    try:
        batch = _CifarUnpickler(io.BytesIO(content), encoding="bytes").load()
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images = _array(fields["data"])
        if not all(type(label) is int for label in fields["labels"]):
            raise ValueError("the labels are not whole numbers")
        labels = np.asarray(fields["labels"], dtype=np.int64)
        images = images.reshape(len(labels), 3, 32, 32)
    except LabError as refusal:
        raise LabError(
            f"{path} {refusal}, which no CIFAR-10 file needs: it was not executed; delete the file and get "
            f"CIFAR-10 again with `rkfac data get {NAME}`."
        ) from None
    except Exception as error:  # a pickle of unknown origin can fail in any way
        raise damaged(path, f"not a CIFAR-10 batch: {type(error).__name__}: {error}", NAME) from error
    return _checked(path, torch.from_numpy(images), torch.from_numpy(labels))


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and labels int64 of one batch of the binary layout."""
    content = np.frombuffer(disk.read(path, LARGEST), dtype=np.uint8).copy()
    if not len(content) or len(content) % RECORD:
        raise damaged(path, f"{len(content)} bytes, not a whole number of {RECORD}-byte records", NAME)
    records = torch.from_numpy(content.reshape(-1, RECORD))
    return _checked(path, records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long())


def _checked(path: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if not labels.numel():
        raise damaged(path, "it holds no image", NAME)
    if not 0 <= int(labels.min()) <= int(labels.max()) <= 9:
        raise damaged(path, f"labels {int(labels.min())}..{int(labels.max())} where 0..9 are possible", NAME)
    if int(images.min()) == int(images.max()):
        raise damaged(path, "all its pixels are the same", NAME)
    return images, labels


def places(sources: Sources) -> list[Path]:
    """Where CIFAR-10's batches may be, in either layout."""
    inside = ("cifar-10-batches-bin", "cifar-10-batches-py", ".")
    return [folder / name for folder in folders(sources) for name in inside]


def cifar10(sources: Sources) -> Dataset:
    """CIFAR-10: images (n, 3, 32, 32) uint8, labels int64."""
    looked = places(sources)
    for place in looked:
        for suffix, read in ((".bin", read_binary), ("", read_python)):
            paths = [place / f"{name}{suffix}" for name in (*TRAIN, TEST)]
            if not any(path.is_file() for path in paths):
                continue
            for path in paths:
                if not path.is_file():
                    raise missing(f"CIFAR-10's {path.name}", [place], NAME)
            batches = [read(path) for path in paths]
            train_x, train_y = (torch.cat(parts) for parts in zip(*batches[:-1], strict=True))
            return Dataset(train_x, train_y, *batches[-1], classes=10)
    raise missing("CIFAR-10's data_batch_1(.bin)", looked, NAME)


def halved_cifar10(sources: Sources) -> Dataset:
    """CIFAR-10 with images (n, 3, 16, 16): every pixel the mean of four."""
    data = cifar10(sources)
    return dataclasses.replace(data, train_x=halved(data.train_x), test_x=halved(data.test_x))


def halved(images: Tensor) -> Tensor:
    """uint8 images of half the size, each pixel the rounded mean of two by two."""
    upper, lower = images[..., ::2, :].short(), images[..., 1::2, :].short()
    columns = upper + lower
    return ((columns[..., ::2] + columns[..., 1::2] + 2) // 4).to(torch.uint8)

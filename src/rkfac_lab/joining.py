"""A command that torchrun started several times: its processes find each other, and the first one alone is heard."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from . import ranks
from .errors import AbandonedError, LabError
from .ranks import Ranks

TIMEOUT = 600.0  # seconds that one process waits for another: more than any checkpoint takes to be written
NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The processes of this command, as torchrun's variables tell; inside, `ranks.here()` knows them too."""
    size = _whole("WORLD_SIZE", os.environ) if os.environ.get("WORLD_SIZE") else 1
    if size <= 1:
        yield ranks.ALONE
        return
    found = _meet(size)
    signal.signal(signal.SIGTERM, _interrupt)  # how torchrun ends the others when one has failed
    code: Any = 0
    try:
        with ranks.among(found), contextlib.nullcontext() if found.first else _silence():
            yield found
    except SystemExit as end:
        code = end.code
        raise
    finally:
        if found.first:
            found.says_its_last_word()
        elif not isinstance(sys.exception(), KeyboardInterrupt):
            found.heard_the_last_word(ranks.ALIKE if code else TIMEOUT)
        if not code and sys.exception() is None:
            distributed.destroy_process_group()


def speaks(together: Ranks, error: LabError) -> bool:
    """Whether this process has to say what is wrong: the first one does, unless it does not know."""
    if together.first or isinstance(error, AbandonedError):
        return True
    return not together.heard_the_last_word(ranks.ALIKE)


def _meet(size: int) -> Ranks:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise LabError(
            f"WORLD_SIZE={size} promises {size} processes, but {' and '.join(missing)} is not set; start with torchrun, or "
            "unset WORLD_SIZE."
        )
    rank, local = _whole("RANK", os.environ), _whole("LOCAL_RANK", os.environ)
    patience = timedelta(seconds=TIMEOUT)
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=patience))
        distributed.init_process_group(
            _backend(local),
            store=store,
            rank=rank,
            world_size=size,
            timeout=patience,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise LabError(
            f"process {rank} of {size} did not find the others ({reason}); start all of them again with torchrun."
        ) from error
    return Ranks(rank, size, local, store)


def _backend(local: int) -> str:
    """gloo for what lies in memory; where there are GPUs, one for each process of a machine, and nccl between them."""
    if not torch.cuda.is_available():
        return "gloo"
    count = torch.cuda.device_count()
    if local >= count:
        raise LabError(f"This machine has {count} GPUs and more processes than that; start one process a GPU.")
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


def _whole(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise LabError(f"{name}={text} is no whole number; start with torchrun, or unset it.")
    return int(text)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what is now written down must not be cut
    raise KeyboardInterrupt

"""One process at a time in a folder: a lock that the operating system lets go of when its holder dies, even by kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .disk import make_folder, trouble
from .errors import LabError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` alone; makes it where there is none, and takes it away again if nothing was put into it."""
    with trouble(folder, "opened"):
        made = [place for place in (folder, *folder.parents) if not place.exists()]
    make_folder(folder)
    path = folder / NAME
    try:
        descriptor = _acquire(path)
        try:
            yield
        finally:
            # While the lock is held: whoever opened this file meanwhile sees that it is gone and tries again.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()  # refuses where there is anything inside


def _acquire(path: Path) -> int:
    while True:
        with trouble(path, "opened"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise LabError(
                f"{path.parent} is in use by process {holder}; wait until it ends, stop it, or choose another folder."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise LabError(
                f"{path} cannot be locked ({error.strerror}); choose a folder on a disk that knows locks."
            ) from error
        if _still_there(descriptor, path):
            with contextlib.suppress(OSError):  # a full disk: the lock holds, only its holder has no name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            return descriptor
        os.close(descriptor)


def _still_there(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is the one others will find, and not one that its last holder just deleted."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

"""Files: read whole or refused, written whole or not at all, and every trouble with the disk said in one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import LabError

LARGEST = 1 << 30  # bytes; nothing the laboratory reads or writes whole comes near it
LEFT_OVER = re.compile(r"\.(?P<name>.+)\.\d+")  # what a killed `write_atomically` leaves: .NAME.PID

# What to do about the troubles people really meet; the operating system only says what is wrong.
ADVICE = {
    errno.ENOSPC: "free some space and run the command again",
    errno.EDQUOT: "free some space and run the command again",
    errno.EFBIG: "raise the limit on the size of files, or choose a place without one",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "change its permissions or choose another place",
    errno.EPERM: "change its permissions or choose another place",
    errno.ENOENT: "its folder was moved or deleted: put it back, or run the command again in another place",
    errno.ENOTDIR: "a file lies where a folder belongs: move it away or choose another place",
    errno.EEXIST: "a file lies where a folder belongs: move it away or choose another place",
    errno.EISDIR: "a folder lies where a file belongs: move it away or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk itself has a fault: copy what can be read and choose another place",
}


def sentence(path: Path | str, doing: str, error: OSError) -> LabError:
    """One sentence: the file, what could not be done with it, why, and what to do."""
    reason = error.strerror or str(error) or type(error).__name__
    advice = ADVICE.get(error.errno or 0, "choose another place")
    return LabError(f"{path} cannot be {doing} ({reason}); {advice}.")


@contextlib.contextmanager
def trouble(path: Path | str, doing: str = "written") -> Iterator[None]:
    """Turn what the operating system raises inside into `sentence`."""
    try:
        yield
    except OSError as error:
        raise sentence(path, doing, error) from error


def make_folder(path: Path) -> None:
    """The folder and those above it."""
    with trouble(path, "made a folder"):
        path.mkdir(parents=True, exist_ok=True)


def damaged(path: Path, why: str, remedy: str) -> LabError:
    """One sentence for a file that is not what it should be."""
    return LabError(f"{path} is damaged ({' '.join(why.split())}); {remedy}.")


def read(path: Path, largest: int = LARGEST) -> bytes:
    """All bytes of a plain file; FileNotFoundError stays what it is, since only the caller knows what that means."""
    try:
        with open(path, "rb") as file:
            content = file.read(largest + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise sentence(path, "read", error) from error
    if len(content) > largest:
        raise LabError(f"{path} has more than {largest} bytes, which no such file needs; name another one.")
    return content


def read_json(path: Path, remedy: str) -> Any:
    """The value in a JSON file; NaN and infinities are refused, as the laboratory never writes them."""
    return parse_json(read(path), path, remedy)


def parse_json(content: bytes, path: Path, remedy: str) -> Any:
    """JSON text from the file `path`, or a sentence that ends with the `remedy`."""
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise damaged(path, "it is nested without end", remedy) from error
    except ValueError as error:
        raise damaged(path, str(error), remedy) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once, making its folder where there is none."""
    make_folder(path.parent)
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write beside the file, flush to disk, then rename: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with trouble(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Add to the end, on disk before this returns; what could not be added whole is taken back."""
    with trouble(path), open(path, "ab") as file:
        before = file.seek(0, os.SEEK_END)
        try:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(OSError):
                os.truncate(path, before)
            raise


def keep_traceback(path: Path) -> Path | None:
    """Write down the traceback of the exception that is being handled; returns where, None if the disk refused."""
    try:
        write_text(path, traceback.format_exc())
    except LabError:
        return None
    return path


def sweep(folder: Path, names: tuple[str, ...]) -> None:
    """Delete what killed processes left beside files of these names; for the holder of the folder's lock only."""
    with trouble(folder, "cleaned"):
        for path in folder.iterdir():
            match = LEFT_OVER.fullmatch(path.name)
            if match and match["name"] in names and path.is_file():
                path.unlink(missing_ok=True)

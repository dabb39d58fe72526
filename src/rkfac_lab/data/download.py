"""`rkfac data get`: fetch a dataset from its official place, resuming, checked, and moved into place at once."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from .. import disk
from ..errors import LabError, unknown
from ..lock import locked

CHUNK = 1 << 16
ATTEMPTS = 5
TIMEOUT = 30.0
UNPACKING = ".unpack-"
LARGEST = 1 << 30  # bytes an archive may unpack to; CIFAR-10 has 184 million
PAUSE = 1.0  # seconds before trying again after a cut connection


@dataclass(frozen=True)
class RemoteFile:
    """One file to fetch; an archive is unpacked and then deleted."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def is_archive(self) -> bool:
        return self.name.endswith(".tar.gz")


@dataclass(frozen=True)
class RemoteDataset:
    """The files of a dataset and the sub-folder of the data folder they end in."""

    folder: str
    files: tuple[RemoteFile, ...]


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
CATALOGUE: Mapping[str, RemoteDataset] = {
    "fashion-mnist": RemoteDataset(
        "fashion-mnist",
        (
            RemoteFile(f"{_FASHION}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            RemoteFile(f"{_FASHION}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            RemoteFile(f"{_FASHION}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            RemoteFile(f"{_FASHION}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "cifar10": RemoteDataset(
        "cifar-10-batches-bin",
        (RemoteFile(f"{_CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    "cifar10-python": RemoteDataset(
        "cifar-10-batches-py",
        (RemoteFile(f"{_CIFAR}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    ),
}


def get(name: str, root: Path, catalogue: Mapping[str, RemoteDataset] = CATALOGUE) -> Path:
    """Fetch dataset `name` under `root`; returns its folder. Files already there are kept."""
    if name not in catalogue:
        raise unknown("dataset", name, catalogue)
    dataset = catalogue[name]
    target = root / dataset.folder
    with locked(root):
        _sweep(root)
        _get_files(dataset, root, target)
    return target


def _sweep(root: Path) -> None:
    """Delete what a killed `unpack` left; partial downloads stay, to be continued."""
    for path in root.glob(f"{UNPACKING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _get_files(dataset: RemoteDataset, root: Path, target: Path) -> None:
    for file in dataset.files:
        if file.is_archive:
            if not target.exists():
                archive = fetch(file, root)
                unpack(archive, target)
                archive.unlink()
        elif not (target / file.name).exists():
            fetch(file, target)


def fetch(file: RemoteFile, folder: Path) -> Path:
    """Download into `folder`: continues a partial file, checks the MD5 sum, then renames; keeps a file put by hand."""
    disk.make_folder(folder)
    final, partial = folder / file.name, folder / f"{file.name}.part"
    if final.exists() and _md5(final) == file.md5:
        return final
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        progress.disable = not progress.console.is_terminal
        bar = progress.add_task(file.name, total=None)
        for attempt in range(ATTEMPTS):
            try:
                if _continue(file.url, partial, lambda done, total: progress.update(bar, completed=done, total=total)):
                    break
                reason = "the connection was cut"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise LabError(f"{file.url} answered {error.code} {error.reason}; get the file by hand.") from error
                reason = str(getattr(error, "reason", error))
            if attempt + 1 < ATTEMPTS:
                time.sleep(PAUSE)
        else:
            raise LabError(
                f"{file.url} could not be fetched ({reason}, {ATTEMPTS} attempts); run the command again to continue, "
                f"or put {file.name} into {folder} by hand and run it then."
            )
    _verify(file, partial)
    os.replace(partial, final)
    return final


def _continue(url: str, partial: Path, report: Callable[[int, int | None], None]) -> bool:
    """Append what is missing to `partial`; False if the connection ended early."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        # Nothing lies beyond what we have: either all of it, which the checksum decides, or a stale file.
        if error.code == 416:
            return True
        raise
    with response:
        start = _first_byte(response)
        if start not in (0, have):
            partial.unlink()
            return False
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        done = start
        with disk.trouble(partial):
            out = open(partial, "ab" if start else "wb")  # noqa: SIM115  (closed below)
        with out:
            while chunk := response.read(CHUNK):
                with disk.trouble(partial):  # trouble of ours, which trying again would not mend
                    out.write(chunk)
                done += len(chunk)
                report(done, total)
    return total is None or done >= total


def _first_byte(response: http.client.HTTPResponse) -> int:
    """Where the answer's bytes begin; a server without Range support begins at 0."""
    if response.status != 206:
        return 0
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match.group(1)) if match else -1


def _verify(file: RemoteFile, partial: Path) -> None:
    found = _md5(partial)
    if found != file.md5:
        partial.unlink()
        raise LabError(
            f"{file.url} arrived with MD5 sum {found} instead of {file.md5}: it was deleted; "
            "run the command again, and if it happens again the file there has changed."
        )


def _md5(path: Path) -> str:
    with open(path, "rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Unpack the folder `target.name` of a tar archive to `target`; takes plain files inside it and nothing else."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=UNPACKING) as temporary:
        ready = Path(temporary) / target.name
        ready.mkdir()
        try:
            with tarfile.open(archive) as tar:
                unpacked = 0
                for member in tar:
                    unpacked += member.size
                    if unpacked > LARGEST:
                        raise LabError(f"{archive} unpacks to more than {LARGEST} bytes: not unpacked; delete it.")
                    parts = PurePosixPath(member.name).parts
                    if member.isdir():
                        continue
                    if not member.isfile() or len(parts) != 2 or parts[0] != target.name or parts[1] == "..":
                        raise LabError(
                            f"{archive} contains {member.name!r}, which does not belong there: not unpacked."
                        )
                    source = tar.extractfile(member)
                    assert source is not None
                    with open(ready / parts[1], "wb") as out:
                        shutil.copyfileobj(source, out)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise LabError(f"{archive} cannot be unpacked ({error}); delete it and get it again.") from error
        ready.rename(target)

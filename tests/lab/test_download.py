"""Downloads against a local server that cuts connections, ignores ranges or serves the wrong bytes."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rkfac_lab.data import download
from rkfac_lab.data.download import RemoteDataset, RemoteFile
from rkfac_lab.errors import LabError

CONTENT = bytes(range(256)) * 2000


class Server(ThreadingHTTPServer):
    """Serves `files`; `cut` is how many bytes of the next answer are sent before the connection breaks."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/numbers.gz": CONTENT}
        self.ranges = True
        self.cut = None
        self.asked = []

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    """GET with optional Range support."""

    def do_GET(self):
        content = self.server.files.get(self.path)
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut, self.server.cut = self.server.cut, None
        self.wfile.write(content[start:] if cut is None else content[start : start + cut])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def remote(server, name="numbers.gz", content=CONTENT):
    return RemoteFile(server.url(name), hashlib.md5(content).hexdigest())


def test_whole_file_in_one_go(server, tmp_path):
    path = download.fetch(remote(server), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["numbers.gz"]


def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path):
    server.cut = 100_000
    assert download.fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]


def test_a_part_of_an_earlier_command_is_continued(server, tmp_path):
    (tmp_path / "numbers.gz.part").write_bytes(CONTENT[:777])
    assert download.fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=777-"]


def test_a_complete_part_needs_only_its_checksum(server, tmp_path):
    (tmp_path / "numbers.gz.part").write_bytes(CONTENT)
    assert download.fetch(remote(server), tmp_path).read_bytes() == CONTENT


def test_server_without_ranges_starts_again(server, tmp_path):
    server.ranges = False
    server.cut = 100_000
    assert download.fetch(remote(server), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-"]


def test_wrong_checksum_is_deleted_and_said(server, tmp_path):
    file = RemoteFile(server.url("numbers.gz"), "0" * 32)
    with pytest.raises(LabError, match=f"{hashlib.md5(CONTENT).hexdigest()} instead of {'0' * 32}"):
        download.fetch(file, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_on_the_server(server, tmp_path):
    with pytest.raises(LabError, match="answered 404"):
        download.fetch(remote(server, "gone.gz"), tmp_path)
    assert len(server.asked) == 1


def test_nobody_there_keeps_the_part(server, tmp_path):
    url = server.url("numbers.gz")
    server.shutdown()
    server.server_close()
    (tmp_path / "numbers.gz.part").write_bytes(CONTENT[:777])
    with pytest.raises(LabError, match=r"could not be fetched .* run the command again to continue"):
        download.fetch(RemoteFile(url, "0" * 32), tmp_path)
    assert (tmp_path / "numbers.gz.part").read_bytes() == CONTENT[:777]


def archive(members):
    """A tar.gz of (name, content) pairs; content None makes a symbolic link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def catalogue(server, content):
    server.files["/set.tar.gz"] = content
    return {"set": RemoteDataset("batches", (remote(server, "set.tar.gz", content),))}


def test_archive_is_unpacked_once(server, tmp_path):
    known = catalogue(server, archive([("batches/one.bin", b"1"), ("batches/two.bin", b"22")]))
    folder = download.get("set", tmp_path, known)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"one.bin": b"1", "two.bin": b"22"}
    assert [p.name for p in tmp_path.iterdir()] == ["batches"]
    download.get("set", tmp_path, known)
    assert len(server.asked) == 1


def test_archive_put_there_by_hand_is_used(server, tmp_path):
    content = archive([("batches/one.bin", b"1")])
    known = catalogue(server, content)
    (tmp_path / "set.tar.gz").write_bytes(content)
    assert (download.get("set", tmp_path, known) / "one.bin").read_bytes() == b"1"
    assert server.asked == []


@pytest.mark.parametrize(
    "member", [("../evil", b"x"), ("batches/..", b"x"), ("/etc/evil", b"x"), ("batches/link", None), ("other/a", b"x")]
)
def test_archive_with_anything_else_is_refused(server, tmp_path, member):
    known = catalogue(server, archive([("batches/one.bin", b"1"), member]))
    with pytest.raises(LabError, match="does not belong there"):
        download.get("set", tmp_path / "data", known)
    assert not (tmp_path / "data" / "batches").exists()
    assert not (tmp_path / "evil").exists()


def test_truncated_archive(server, tmp_path):
    known = catalogue(server, archive([("batches/one.bin", bytes(100_000))])[:-40])
    with pytest.raises(LabError, match="cannot be unpacked"):
        download.get("set", tmp_path, known)


def test_unknown_dataset_names_the_nearest(tmp_path):
    with pytest.raises(LabError, match="did you mean 'cifar10'"):
        download.get("cifar-10", tmp_path)


def test_official_places_and_sums():
    names = {file.name: file.md5 for dataset in download.CATALOGUE.values() for file in dataset.files}
    assert names["cifar-10-binary.tar.gz"] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert names["train-images-idx3-ubyte.gz"] == "8d4fb7e6c68d591d4c3dfef9ec88bf0d"
    assert all(len(md5) == 32 for md5 in names.values())

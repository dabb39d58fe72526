"""Run files and data, damaged in every way: one sentence that names the file, never a traceback, never silence."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from rkfac_lab.data import Sources, cifar, idx
from rkfac_lab.errors import LabError

from .damage import BYTES, refused
from .test_data import idx_bytes, write_cifar, write_fashion

# --- configurations

TOML = {
    "empty key": "= 3",
    "cut": 'workload = "tiny',
    "a list of tables": "[[optimizer]]\nname = 'sgd'",
    "wrong type": "epochs = 'three'",
    "wrong key": "epoch = 3",
    "NaN": "[optimizer.arguments]\nlr = nan",
    "infinite": "time_budget = inf",
    "a date": "[optimizer.arguments]\nlr = 2020-01-01",
    "huge": "epochs = 0x" + "f" * 5000,
    "huge in decimals": "epochs = " + "9" * 5000,
    "nested": "label = " + "[" * 5000,
    "nested and closed": "[optimizer.arguments]\nx = " + "[" * 100 + "]" * 100,
    "threads": "threads = 100000",
    "schedule of nothing": "schedule = 3",
    "schedule of a text": "[schedule]\nlr = 'slow'",
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML.keys())
@pytest.mark.parametrize("command", ["train", "compare"])
def test_damaged_run_files(tmp_path, rkfac, monkeypatch, command, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text)
    arguments = ["train", "run.toml"] if command == "train" else ["compare", "--optimizers", "run.toml"]
    refused(rkfac(*arguments), "run.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 50, None], ids=["not UTF-8", "zeros", "a folder"])
def test_run_files_that_are_no_text(tmp_path, rkfac, content):
    path = tmp_path / "run.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    refused(rkfac("train", path), "run.toml")


# --- data


@pytest.mark.parametrize("damage", BYTES.values(), ids=BYTES.keys())
@pytest.mark.parametrize("name", [f"{idx.STEMS[0]}.gz", f"{idx.STEMS[3]}.gz"])
def test_damaged_fashion_mnist(tmp_path, rkfac, name, damage):
    write_fashion(tmp_path / "fashion-mnist")
    path = tmp_path / "fashion-mnist" / name
    path.write_bytes(damage(path.read_bytes()))
    command = ("train", "fashion-widemlp", "--data-dir", tmp_path, "--folder", tmp_path / "r")
    assert "rkfac data get fashion-mnist" in refused(rkfac(*command), name)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("damage", BYTES.values(), ids=BYTES.keys())
@pytest.mark.parametrize("layout, name", [("bin", "data_batch_2.bin"), ("py", "test_batch")])
def test_damaged_cifar(tmp_path, rkfac, layout, name, damage):
    write_cifar(tmp_path / f"cifar-10-batches-{layout}", layout)
    path = tmp_path / f"cifar-10-batches-{layout}" / name
    path.write_bytes(damage(path.read_bytes()))
    command = ("train", "cifar10-vgg-small", "--data-dir", tmp_path, "--folder", tmp_path / "r")
    assert "rkfac data get cifar10" in refused(rkfac(*command), name)


@pytest.mark.parametrize("place", ["fashion-mnist", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_folders_in_the_place_of_data(tmp_path, rkfac, place):
    (tmp_path / place).mkdir()
    for name in (*(f"{stem}.gz" for stem in idx.STEMS), *cifar.TRAIN, *(f"{name}.bin" for name in cifar.TRAIN)):
        (tmp_path / place / name).mkdir()
    workload = "fashion-widemlp" if place == "fashion-mnist" else "cifar10-vgg-small"
    refused(rkfac("train", workload, "--data-dir", tmp_path, "--folder", tmp_path / "r"), str(tmp_path))


TEXTS = {"empty": b"", "short": b"hello", "not UTF-8": b"\xff" * 9000, "one character": b"a" * 9000, "a folder": None}


@pytest.mark.parametrize("content", TEXTS.values(), ids=TEXTS.keys())
def test_damaged_texts(tmp_path, rkfac, content):
    path = tmp_path / "text.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    setting = f"text_file={json.dumps(str(path))}"
    refused(rkfac("train", "text-transformer", "--set", setting, "--folder", tmp_path / "r"), "text.txt")


@pytest.mark.parametrize("announced", [5, 2**31], ids=["a small file", "an enormous file"])
def test_a_gzip_bomb_is_not_unpacked(tmp_path, announced):
    """200 million zeros in 200 kB: no more of them are unpacked than the header announces, nor more than is sensible."""
    header = struct.pack(">BBBBI", 0, 0, 8, 1, announced)
    packer = zlib.compressobj(1, wbits=31)
    packed = packer.compress(header) + b"".join(packer.compress(bytes(10**6)) for _ in range(200)) + packer.flush()
    (tmp_path / "bomb.gz").write_bytes(packed)
    tracemalloc.start()
    try:
        with pytest.raises(LabError, match=r"bomb\.gz is damaged"):
            idx.read_idx(tmp_path / "bomb.gz")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("array", [np.zeros((0, 28, 28)), np.zeros((5, 3, 3)), np.zeros((5, 28, 29))])
def test_images_that_no_model_could_take_are_refused(tmp_path, array):
    write_fashion(tmp_path / "d", zipped=False)
    (tmp_path / "d" / "train-images-idx3-ubyte").write_bytes(idx_bytes(array))
    with pytest.raises(LabError, match="train-images-idx3-ubyte is damaged"):
        idx.fashion_mnist(Sources(str(tmp_path / "d")))

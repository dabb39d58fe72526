"""Readers: what they return, and one sentence for every way a file can be missing, damaged or hostile."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from rkfac_lab.data import Sources, catalogue, cifar, idx, text
from rkfac_lab.data.augment import crop_and_flip
from rkfac_lab.data.batches import Batches
from rkfac_lab.data.digits import digits
from rkfac_lab.errors import LabError


def idx_bytes(array, kind=8):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


IMAGES = np.arange(5 * 28 * 28).reshape(5, 28, 28) % 251
LABELS = np.array([3, 0, 9, 1, 2])


def write_fashion(folder, zipped=True):
    folder.mkdir(parents=True)
    for stem in idx.STEMS:
        content = idx_bytes(IMAGES if "images" in stem else LABELS)
        path = folder / (f"{stem}.gz" if zipped else stem)
        path.write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", ["fashion-mnist", "."])
def test_fashion_mnist_is_what_was_written(tmp_path, zipped, inside):
    write_fashion(tmp_path / "d" / inside, zipped)
    found = idx.fashion_mnist(Sources(str(tmp_path / "d")))
    assert found.train_x.dtype == torch.uint8
    assert np.array_equal(found.train_x.numpy(), IMAGES)
    assert found.test_y.tolist() == LABELS.tolist()


def test_fashion_mnist_through_the_environment(tmp_path, monkeypatch):
    write_fashion(tmp_path / "fashion-mnist")
    monkeypatch.setenv("RKFAC_DATA", str(tmp_path))
    assert len(idx.fashion_mnist(Sources()).train_x) == 5


def test_missing_file_says_what_where_and_how(tmp_path):
    with pytest.raises(LabError) as caught:
        idx.fashion_mnist(Sources(str(tmp_path)))
    message = str(caught.value)
    assert "train-images-idx3-ubyte" in message
    assert str(tmp_path) in message
    assert "rkfac data get fashion-mnist" in message
    assert "\n" not in message


def test_explicit_folder_is_the_only_one_searched(tmp_path, monkeypatch):
    write_fashion(tmp_path / "good" / "fashion-mnist")
    monkeypatch.setenv("RKFAC_DATA", str(tmp_path / "good"))
    with pytest.raises(LabError, match="is missing"):
        idx.fashion_mnist(Sources(str(tmp_path / "wrong")))


GOOD = idx_bytes(LABELS)
DAMAGE = {
    "truncated gzip": ("a.gz", gzip.compress(idx_bytes(IMAGES))[:-30], "gzip stream"),
    "not gzip": ("a.gz", GOOD, "gzip stream"),
    "broken deflate": ("a.gz", gzip.compress(idx_bytes(IMAGES))[:60] + b"\xff" * 400, "gzip stream"),
    "bad magic": ("a", b"\1" + GOOD[1:], "does not begin"),
    "empty": ("a", b"", "does not begin"),
    "floats": ("a", idx_bytes(LABELS, kind=13), "element type 0x0d"),
    "header cut": ("a", GOOD[:6], "header is cut"),
    "too short": ("a", GOOD[:-1], "4 bytes of data instead of 5"),
    "too long": ("a", GOOD + b"\0", "more than 5 bytes of data"),
}


@pytest.mark.parametrize("name, content, reason", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_idx_is_refused_in_one_sentence(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError, match=reason) as caught:
        idx.read_idx(tmp_path / name)
    assert "rkfac data get" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_fit_the_images(tmp_path):
    write_fashion(tmp_path / "d", zipped=False)
    (tmp_path / "d" / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS[:4]))
    with pytest.raises(LabError, match="4 labels for 5 images"):
        idx.fashion_mnist(Sources(str(tmp_path / "d")))


# --- CIFAR-10

COUNT = 3
PIXELS = np.random.default_rng(0).integers(0, 256, (6, COUNT, 3072), dtype=np.uint8)
CLASSES = np.random.default_rng(1).integers(0, 10, (6, COUNT))
NAMES = [*cifar.TRAIN, cifar.TEST]


def write_cifar(folder, layout):
    folder.mkdir(parents=True)
    for name, pixels, classes in zip(NAMES, PIXELS, CLASSES, strict=True):
        if layout == "bin":
            records = np.concatenate([classes[:, None].astype(np.uint8), pixels], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            batch = {b"batch_label": b"x", b"labels": classes.tolist(), b"data": pixels, b"filenames": [b"a"] * COUNT}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("layout", ["bin", "py"])
def test_cifar_in_both_layouts(tmp_path, layout):
    write_cifar(tmp_path / f"cifar-10-batches-{layout}", layout)
    found = cifar.cifar10(Sources(str(tmp_path)))
    assert found.train_x.shape == (5 * COUNT, 3, 32, 32)
    assert np.array_equal(found.train_x.numpy().reshape(5, COUNT, 3072), PIXELS[:5])
    assert found.train_y.tolist() == CLASSES[:5].ravel().tolist()
    assert np.array_equal(found.test_x.numpy().reshape(COUNT, 3072), PIXELS[5])
    assert found.test_y.tolist() == CLASSES[5].tolist()


def test_cifar_as_python_2_pickled_it(tmp_path):
    """Opcode by opcode what cPickle wrote in 2009: str keys, numpy.core.multiarray, latin-1 strings."""
    data = PIXELS[0].tobytes()
    pickled = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x03M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff"
        b"\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(data)) + data + b"tbU\x06labelsq\x08]q\x09"
        b"(K\x01K\x02K\x09eu."
    )
    (tmp_path / "b").write_bytes(pickled)
    images, labels = cifar.read_python(tmp_path / "b")
    assert np.array_equal(images.numpy().reshape(COUNT, 3072), PIXELS[0])
    assert labels.tolist() == [1, 2, 9]


class Hostile:
    """Pickles to a call of os.mkdir."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_hostile_pickle_is_refused_by_name_and_not_run(tmp_path):
    path, victim = tmp_path / "data_batch_1", tmp_path / "executed"
    path.write_bytes(pickle.dumps({b"data": Hostile(str(victim)), b"labels": []}))
    with pytest.raises(LabError, match=r"asks for (posix|nt|os)\.mkdir"):
        cifar.read_python(path)
    assert not victim.exists()


def python_batch(data, labels):
    return pickle.dumps({b"data": data, b"labels": labels}, protocol=2)


BROKEN_PICKLES = {
    "truncated": python_batch(PIXELS[0], [1, 2, 3])[:-100],
    "not a pickle": b"hello",
    "a list": pickle.dumps([1]),
    "no labels": pickle.dumps({b"data": PIXELS[0]}, protocol=2),
    "floats": python_batch(PIXELS[0].astype(np.float32), [1, 2, 3]),
    "too few labels": python_batch(PIXELS[0], [1, 2]),
    "impossible label": python_batch(PIXELS[0], [1, 2, 10]),
    "text as labels": python_batch(PIXELS[0], ["a", "b", "c"]),
    "empty": b"",
    "no image": pickle.dumps({b"data": PIXELS[0][:0], b"labels": []}, protocol=4),
    "half a label": python_batch(PIXELS[0], [1, 2, 3.5]),
    "nested without end": b"(" * 100_000 + b".",
}


@pytest.mark.parametrize("content", BROKEN_PICKLES.values(), ids=BROKEN_PICKLES.keys())
def test_damaged_python_batch(tmp_path, content):
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(LabError, match="is damaged") as caught:
        cifar.read_python(tmp_path / "test_batch")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, reason", [(b"\1" * 3072, "whole number"), (b"", "whole number"), (b"\x63" * 3073, "99")]
)
def test_damaged_binary_batch(tmp_path, content, reason):
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(LabError, match=reason):
        cifar.read_binary(tmp_path / "test_batch.bin")


def test_cifar_with_one_batch_missing_names_it(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin", "bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(LabError, match=r"data_batch_3\.bin is missing"):
        cifar.cifar10(Sources(str(tmp_path)))


# --- digits and text


def test_digits_split_is_fixed_and_disjoint():
    first, again = digits(Sources()), digits(Sources())
    assert first.train_x.shape == (1400, 64)
    assert first.test_x.shape == (397, 64)
    assert torch.equal(first.train_x, again.train_x)
    assert first.train_x.max() == 1
    from sklearn.datasets import load_digits

    original = sorted(map(tuple, (load_digits().data / 16).tolist()))
    assert sorted(map(tuple, torch.cat([first.train_x, first.test_x]).tolist())) == original


def test_text_windows_predict_the_next_character(tmp_path):
    (tmp_path / "t.txt").write_text("abcde" * 1000, encoding="utf-8")
    found = text.text(Sources(text_file=str(tmp_path / "t.txt")))
    assert found.classes == 6
    assert found.train_x.shape == (70, text.CONTEXT)  # (4500 - 1) // 64
    assert torch.equal(found.train_x[:, 1:], found.train_y[:, :-1])
    assert torch.equal(found.train_x.flatten()[1:], found.train_y.flatten()[:-1])
    assert torch.equal(found.train_y, found.train_x % 5 + 1)  # a -> b -> ... -> e -> a
    assert len(found.test_x) == 7  # (500 - 1) // 64


def test_rare_characters_share_one_symbol():
    symbols, size = text.encode("".join(chr(1000 + i) for i in range(300)) + "zz")
    assert size == text.KNOWN + 1
    assert symbols[-1] == 1
    assert (symbols == 0).sum() == 301 - text.KNOWN


def test_default_text_is_python_and_repeatable():
    found = text.python_source(5000)
    assert len(found) == 5000
    assert "import" in found
    assert text.python_source(5000) == found


@pytest.mark.parametrize(
    "content, reason", [(None, "cannot be read"), (b"\xff\xfe\x00" * 2000, "not UTF-8"), (b"short", "5 characters")]
)
def test_unusable_text(tmp_path, content, reason):
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LabError, match=reason):
        text.text(Sources(text_file=str(path)))


def test_catalogue_tells_what_is_here(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-bin", "bin")
    lines = {entry.name: str(entry) for entry in catalogue.entries(Sources(str(tmp_path)))}
    assert "15 training and 3 test" in lines["cifar10"]
    assert "1,400 training" in lines["digits"]
    assert "rkfac data get fashion-mnist" in lines["fashion-mnist"]


# --- augmentation and batches


def naive_crop_and_flip(images, generator, padding):
    count, _, height, width = images.shape
    top = torch.randint(2 * padding + 1, (count, 1), generator=generator)
    left = torch.randint(2 * padding + 1, (count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    out = []
    for i, image in enumerate(images):
        padded = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding, dtype=image.dtype)
        padded[:, padding : padding + height, padding : padding + width] = image
        window = padded[:, top[i] : top[i] + height, left[i] : left[i] + width]
        out.append(window.flip(2) if mirrored[i] else window)
    return torch.stack(out)


def test_crop_and_flip_equals_the_naive_loop():
    images = torch.randint(1, 256, (40, 3, 6, 5), dtype=torch.uint8)
    got = crop_and_flip(images, torch.Generator().manual_seed(3), padding=2)
    assert torch.equal(got, naive_crop_and_flip(images, torch.Generator().manual_seed(3), padding=2))


def test_every_offset_and_both_mirrors_occur():
    image = torch.arange(1, 5, dtype=torch.uint8).view(1, 1, 2, 2).expand(4000, 1, 2, 2)
    seen = {tuple(x.flatten().tolist()) for x in crop_and_flip(image, torch.Generator().manual_seed(0), padding=1)}
    assert (1, 2, 3, 4) in seen
    assert (2, 1, 4, 3) in seen
    assert (0, 0, 0, 1) in seen
    # 3 x 3 offsets, mirrored or not: 18 different pictures of four different pixels
    assert len(seen) == 18


def test_batches_cover_every_sample_once_an_epoch_and_epochs_differ():
    x = torch.arange(10)
    batches = Batches(x, x * 2, batch_size=4, seed=0)
    epochs = []
    for _ in range(2):
        batches.shuffle()
        taken = []
        while not batches.exhausted:
            xs, ys = batches.take()
            assert torch.equal(ys, xs * 2)
            taken.append(xs)
        assert [len(t) for t in taken] == [4, 4, 2]
        assert len(batches) == 3
        epochs.append(torch.cat(taken).tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_batches_resume_in_the_middle_of_an_epoch():
    images = torch.randint(256, (10, 1, 4, 4), dtype=torch.uint8)
    one = Batches(images, torch.arange(10), 4, seed=5, augment=crop_and_flip)
    other = Batches(images, torch.arange(10), 4, seed=6, augment=crop_and_flip)
    one.shuffle()
    one.take()
    other.load_state_dict(one.state_dict())
    for _ in range(2):
        (x1, y1), (x2, y2) = one.take(), other.take()
        assert torch.equal(x1, x2)
        assert torch.equal(y1, y2)
    one.shuffle()
    other.shuffle()
    assert torch.equal(one.permutation, other.permutation)


def test_halved_images_are_rounded_means_of_four():
    image = torch.tensor([[0, 1, 255, 255], [1, 1, 255, 254], [9, 0, 0, 0], [0, 0, 0, 2]], dtype=torch.uint8)
    halves = cifar.halved(image.expand(2, 3, 4, 4))
    assert (halves.dtype, halves.shape) == (torch.uint8, (2, 3, 2, 2))
    assert halves[1, 2].tolist() == [[1, 255], [2, 1]]  # 0.75, 254.75, 2.25, 0.5


def test_python_source_goes_on_in_packages_where_modules_end(tmp_path, monkeypatch):
    files = {"b.py": "B", "a.py": "A", "pack/__init__.py": "P", "pack/inner/z.py": "Z", "early/__init__.py": "E"}
    files |= {"site-packages/other/__init__.py": "not Python's own"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert text.python_source() == "ABEPZ"
    assert text.python_source(3) == "ABE"

"""CIFAR-10 and MNIST from small files in their own formats, and what is said where there are none."""

import gzip
import pickle
import struct
from hashlib import md5

import numpy as np
import pytest
from caption_data import refusal
from torchvision import datasets

from vlm.data.sources.torchvision_sets import SETS, TorchvisionSet

RNG = np.random.default_rng(0)


def idx(array):
    """Bytes in the format of MNIST's files (https://yann.lecun.com/exdb/mnist)."""
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path):
    """Files of 5 and 3 digits: (root, {split: (pixels, labels)})."""
    content = {}
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, prefix, size in (("train", "train", 5), ("test", "t10k", 3)):
        pixels, labels = RNG.integers(0, 256, (size, 28, 28), dtype=np.uint8), RNG.integers(0, 10, size)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(pixels))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
        content[split] = pixels, labels.tolist()
    return tmp_path, content


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Files of 2 images a batch, whose hashes torchvision is told: (root, {split: (pixels, labels)})."""
    names = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, entry):
        data = pickle.dumps(entry)
        (folder / name).write_bytes(data)
        return md5(data).hexdigest()

    def batch(name):
        pixels, labels = RNG.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8), RNG.integers(0, 10, 2).tolist()
        return (name, write(name, {"data": pixels.reshape(2, -1), "labels": labels})), pixels, labels

    made = {"train": [batch(f"data_batch_{n}") for n in range(1, 6)], "test": [batch("test_batch")]}
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [row[0] for row in made["train"]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [row[0] for row in made["test"]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": write("batches.meta", {"label_names": names})}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    content = {
        split: (np.concatenate([row[1] for row in rows]), [label for row in rows for label in row[2]])
        for split, rows in made.items()
    }
    return tmp_path, content


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test reaches for the network, whether there is one or not."""

    def refuse(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


def test_mnist_reads_as_the_files_say(mnist):
    root, content = mnist
    source = TorchvisionSet(name="MNIST", root=str(root))
    assert source.splits == ("train", "test") and source.classes[:2] == ["0 - zero", "1 - one"]
    for name, (pixels, labels) in content.items():
        split = source.split(name)
        assert [split.record(index, 4)["label"] for index in range(len(split))] == labels
        for grey, record in zip(pixels, split.records(), strict=True):
            image = record.image()
            assert image.mode == "RGB" and np.array_equal(np.asarray(image), np.repeat(grey[..., None], 3, -1))
        assert [record.id for record in split.records()] == [f"{name}/0000{i}" for i in range(len(labels))]
    assert "choose one of train, test" in refusal(source.split, "val")


def test_cifar10_reads_as_the_files_say_and_no_damaged_one(cifar10):
    root, content = cifar10
    source = TorchvisionSet(name="CIFAR10", root=str(root), download=False)
    assert source.classes[0] == "plane"
    for name, (pixels, labels) in content.items():
        split = source.split(name)
        assert [split.record(index)["label"] for index in range(len(split))] == labels
        assert all(np.array_equal(np.asarray(split.record(i).image()), pixels[i].transpose(1, 2, 0)) for i in range(2))
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"something that must not be unpickled")
    assert "put cifar-10-python.tar.gz" in refusal(TorchvisionSet, name="CIFAR10", root=str(root))


def test_downloaded_archives_are_unpacked_where_they_lie(mnist, monkeypatch):
    root, _ = mnist
    resources = []
    for path in list((root / "MNIST" / "raw").iterdir()):
        data = gzip.compress(path.read_bytes())
        path.with_name(f"{path.name}.gz").write_bytes(data)
        path.unlink()
        resources.append((f"{path.name}.gz", md5(data).hexdigest()))
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    assert len(TorchvisionSet(name="MNIST", root=str(root), download=True).split("train")) == 5


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("download", [True, False])
def test_without_files_and_network_the_message_names_both_folder_and_files(tmp_path, name, download):
    message = refusal(TorchvisionSet, name=name, root=str(tmp_path), download=download)
    assert f"into {tmp_path}" in message
    assert ("could not be downloaded" if download else "download is off") in message
    archive = "cifar-10-python.tar.gz" if name == "CIFAR10" else f"ubyte.gz (from {SETS[name].home}"
    assert archive in message


def test_the_files_that_are_named_are_torchvisions():
    assert datasets.CIFAR10.filename in SETS["CIFAR10"].names
    for name in ("MNIST", "FashionMNIST"):
        theirs = {file for file, _ in getattr(datasets, name).resources}
        kinds = {file.partition("-")[2] for file in theirs}
        assert theirs == {f"{split}-{kind}" for split in ("train", "t10k") for kind in kinds}
        assert kinds == {"images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"}
        assert all(kind in SETS[name].names for kind in kinds)


def test_an_unknown_name_is_refused(tmp_path):
    assert "choose one of CIFAR10" in refusal(TorchvisionSet, name="CIFAR11", root=str(tmp_path))

"""Folders of classes, as torchvision lists them, and the same in a tar, of which nothing hostile is followed."""

import io
import multiprocessing
import os
import tarfile
from collections import Counter

import pytest
from caption_data import content, refusal
from class_data import lay_out, pack, png, tiny
from shared_data import SHARED, needs_shared
from torchvision.datasets import ImageFolder as TorchvisionFolder

from vlm.data.images.image import ImageError, load_image
from vlm.data.sources.class_folders import ClassFolders

LAYOUTS = [
    [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(6)],
    [f"{split}/{name}/{n}.png" for split in ("train", "val") for name in ("cat", "dog") for n in range(2)],
    [f"set/{split}/{name}/{n}.png" for split in ("train", "test") for name in ("cat", "dog") for n in range(2)],
]


def folder(root, **options):
    return ClassFolders(root=str(root), **options)


def tar(path, **options):
    return ClassFolders(path=str(path), **options)


def write(path, *members):
    """A tar of (name, content or type, link target)."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            else:
                member.type, member.linkname = data
                archive.addfile(member)
    return path


def many(root, prefix="", **sizes):
    lay_out(root, *(f"{prefix}{name}/{number:03}.png" for name, size in sizes.items() for number in range(size)))


def test_the_listing_is_torchvisions(tmp_path):
    many(tmp_path, cat=3, Dog=2, bird=4)
    lay_out(tmp_path, "cat/more/1.png", "bird/B.PNG")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    source, truth = folder(tmp_path, val_fraction=0), TorchvisionFolder(str(tmp_path))
    assert source.classes == truth.classes
    records = list(source.split("train").records())
    assert sorted((str(tmp_path / record.id), record["label"]) for record in records) == sorted(truth.samples)
    assert all(record.image() == load_image(tmp_path / record.id) for record in records)


@pytest.mark.parametrize("validation", ["val", "valid", "Validation", "dev"])
def test_folders_say_the_splits_whatever_is_around_them(tmp_path, validation):
    many(tmp_path, "set/train/", cat=2, dog=3)
    many(tmp_path, "set/test/", cat=1)
    assert folder(tmp_path).splits == ("train", "test")
    many(tmp_path, f"set/{validation}/", dog=1)
    assert content(folder(tmp_path)) == {
        "train": {f"set/train/{name}/00{n}.png": name for name, size in (("cat", 2), ("dog", 3)) for n in range(size)},
        "val": {f"set/{validation}/dog/000.png": "dog"},
        "test": {"set/test/cat/000.png": "cat"},
    }


def test_a_class_may_be_called_train(tmp_path):
    many(tmp_path, train=3, car=3)
    source = folder(tmp_path, val_fraction=0)
    assert source.classes == ["car", "train"]
    assert len(source.split("train")) == 6


def test_without_split_folders_each_class_keeps_its_share(tmp_path):
    sizes = {"a": 40, "b": 23, "c": 7, "d": 2}
    many(tmp_path, **sizes)
    found = content(folder(tmp_path, val_fraction=0.2, test_fraction=0.1))
    assert [len(found[name]) for name in ("val", "test")] == [14, 7]
    for name, fraction in (("val", 0.2), ("test", 0.1)):
        counts = Counter(found[name].values())
        assert all(abs(counts[label] - fraction * size) < 1.2 for label, size in sizes.items())
    everything = [path for split in found.values() for path in split]
    assert len(everything) == len(set(everything)) == sum(sizes.values())
    assert set(found["train"].values()) == set(sizes)
    assert content(folder(tmp_path)) == content(folder(tmp_path)) != content(folder(tmp_path, seed=1))


def test_hidden_files_are_passed_over(tmp_path):
    many(tmp_path, cat=2, dog=2)
    lay_out(tmp_path, ".cache/1.png", "cat/._000.png", "__MACOSX/cat/1.png")  # macOS
    lay_out(tmp_path, ".ipynb_checkpoints/1.png", "cat/.ipynb_checkpoints/000-checkpoint.png")  # notebooks
    for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "cat/desktop.ini", "Thumbs.db"):  # Windows
        (tmp_path / name).write_bytes(b"no image")
    source = folder(tmp_path, val_fraction=0)
    assert len(source.split("train")) == 4 and not source.skipped


def test_what_is_left_out_is_said(tmp_path):
    many(tmp_path, "train/", cat=2, dog=2)
    lay_out(tmp_path, "train/loose.png", "extra/cat/1.png", "extra/cat/2.png")
    assert folder(tmp_path).skipped == [
        f"{tmp_path}/extra/cat: 2 images not in a class folder of a split",
        f"{tmp_path}/train: 1 image not in a class folder of a split",
    ]


def test_refusals_name_the_folder_and_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "absent", tmp_path / "file"):
        assert "set data.root" in refusal(folder, place)
    assert "contains no image" in refusal(folder, tmp_path)
    tiny(tmp_path / "1.png")
    assert "none in a class folder" in refusal(folder, tmp_path)
    many(tmp_path, cat=1)
    assert "only one class, cat" in refusal(folder, tmp_path)
    many(tmp_path, dog=1)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty: contains no image" in refusal(folder, tmp_path)
    assert "val_fraction=0.6" in refusal(folder, tmp_path, val_fraction=0.6, test_fraction=0.4)
    (tmp_path / "empty").rmdir()
    assert "unknown split 'test'; choose one of train" in refusal(folder(tmp_path).split, "test")


def test_splits_need_train_and_its_classes(tmp_path):
    many(tmp_path, "val/", cat=1, wolf=1)
    many(tmp_path, "test/", cat=1)
    assert "test and val, but no train folder" in refusal(folder, tmp_path)
    many(tmp_path, "train/", cat=1, dog=1)
    message = refusal(folder, tmp_path)
    assert f"{tmp_path}/val/wolf" in message and "no class 'wolf'" in message
    (tmp_path / "train" / "wolf").mkdir()
    assert f"{tmp_path}/train/wolf: contains no image" in refusal(folder, tmp_path)


# The same in a tar


@pytest.mark.parametrize("names", LAYOUTS)
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_equals_the_folder(tmp_path, names, form):
    lay_out(tmp_path / "data", *names)
    with tarfile.open(tmp_path / "data.tar", "w", format=form) as archive:
        archive.add(tmp_path / "data", arcname=".")
    source, truth = tar(tmp_path / "data.tar", seed=4), folder(tmp_path / "data", seed=4)
    assert source.classes == truth.classes
    assert content(source) == content(truth)
    for name in source.splits:
        pairs = zip(source.split(name).records(), truth.split(name).records(), strict=True)
        assert all(ours.image() == theirs.image() for ours, theirs in pairs)


def test_long_names_and_empty_folders(tmp_path):
    lay_out(tmp_path / "data", "cat/1.png", "dog/1.png", f"dog/{'long' * 40}.png")
    assert len(tar(pack(tmp_path / "data.tar", tmp_path / "data"), val_fraction=0).split("train")) == 3
    (tmp_path / "data" / "wolf").mkdir()
    assert "wolf: contains no image" in refusal(tar, pack(tmp_path / "data.tar", tmp_path / "data"))


def _pixels(at):
    split, index = at
    return split.record(index).image().tobytes()


@pytest.mark.slow
def test_processes_share_no_place_in_the_file(tmp_path):
    lay_out(tmp_path / "data", *(f"{name}/{n}.png" for name in "ab" for n in range(20)))
    split = tar(pack(tmp_path / "data.tar", tmp_path / "data"), val_fraction=0).split("train")
    keys = [(split, index) for index in range(len(split))] * 5
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(_pixels, keys, chunksize=3) == [_pixels(key) for key in keys]


def test_hostile_members_are_passed_over_and_of_one_name_the_last_counts(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    outside = [(name, png()) for name in ("/etc/cat/1.png", "../cat/2.png", "cat/../../3.png", "cat\\8.png")]
    kinds = [
        (tarfile.SYMTYPE, str(secret)),
        (tarfile.LNKTYPE, "cat/1.png"),
        (tarfile.CHRTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ]
    odd = [(f"cat/{number}.png", kind) for number, kind in enumerate(kinds, 4)]
    good = [("cat/1.png", png(1)), ("dog/1.png", png(2)), ("cat/1.png", png(3))]
    path = write(tmp_path / "data.tar", *outside, *odd, *good)
    before = sorted(os.listdir(tmp_path))
    source = tar(path, val_fraction=0)
    assert content(source) == {"train": {"cat/1.png": "cat", "dog/1.png": "dog"}}
    assert source.split("train").record(0).image() == load_image(png(3))
    assert sorted(os.listdir(tmp_path)) == before


def test_unreadable_images_are_named(tmp_path):
    lay_out(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "cat" / "1.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=rf"{tmp_path}/cat/1\.png: damaged"):
        folder(tmp_path, val_fraction=0).split("train").record(0).image()
    path = write(tmp_path / "data.tar", ("a/1.png", b"no image"), ("b/1.png", png()))
    split = tar(path, val_fraction=0).split("train")
    with pytest.raises(ImageError, match=rf"^{path}/a/1\.png: damaged"):
        split.record(0).image()
    with open(path, "r+b") as file:
        file.truncate(1560)
    with pytest.raises(ImageError, match=r"b/1\.png: the tar is truncated inside this file"):
        split.record(1).image()
    path.unlink()
    with pytest.raises(ImageError, match=r"a/1\.png: No such file"):
        split.record(0).image()


def test_refusals_name_the_tar_and_the_remedy(tmp_path):
    (tmp_path / "text.tar").write_text("no tar" * 1000)
    lay_out(tmp_path / "data", *LAYOUTS[0])
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "data", arcname=".")
    said = {"absent.tar": "set data.path", "text.tar": "cannot be read as a tar", "data.tar.gz": "uncompressed"}
    write(tmp_path / "none.tar", ("a/1.txt", b"x"))
    for name, words in {**said, "none.tar": "set data.path"}.items():
        assert words in refusal(tar, tmp_path / name)


def test_a_tar_that_is_not_whole_is_refused_wherever_it_breaks(tmp_path):
    lay_out(tmp_path / "data", *LAYOUTS[0])
    path = pack(tmp_path / "data.tar", tmp_path / "data")
    whole = path.read_bytes()
    assert len(tar(path, val_fraction=0).split("train")) == 12
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isreg()][8:]
    for member in members:
        for end in (member.offset, member.offset + 100, member.offset_data, member.offset_data + 5):
            path.write_bytes(whole[:end])
            assert "data.tar: cannot be read as a tar" in refusal(tar, path)
    path.write_bytes(whole[: members[0].offset] + b"x" * 512 + whole[members[0].offset + 512 :])
    assert "damaged at byte" in refusal(tar, path)


def test_the_path_may_be_within_the_root(tmp_path):
    lay_out(tmp_path / "data", *LAYOUTS[1])
    pack(tmp_path / "data.tar", tmp_path / "data")
    assert tar("data.tar", root=str(tmp_path)).splits == ("train", "val")


@pytest.mark.slow
@needs_shared("cifar10.tar")
def test_cifar10_as_a_tar():
    source = tar(SHARED / "cifar10.tar")
    assert {name: len(source.split(name)) for name in source.splits} == {"train": 50_000, "test": 10_000}
    assert source.classes == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    split = source.split("test")
    assert all(split.record(index).image().size == (32, 32) for index in range(0, len(split), 97))

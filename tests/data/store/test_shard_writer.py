"""What is written as shards comes back as it was."""

import hashlib
import json
import os
import tarfile

import pytest
from caption_data import captions, content, picture
from class_data import lay_out, pack

from vlm.data.records import SplitSubset
from vlm.data.shapes.scene_labels import ShapeClasses
from vlm.data.sources.class_folders import ClassFolders
from vlm.data.sources.shards import Shards
from vlm.data.store.shard_sets import iter_sample_files, write_manifest, write_split
from vlm.data.store.shards import build_index

DRAWN = {"seed": 0, "image_size": 32, "shapes": ["circle", "cross"], "colors": ["red", "green", "blue"]}
DRAWN |= {"sizes": ["small", "large"], "train_scenes": 7, "val_scenes": 6, "test_scenes": 6}


def write(source, out, *, shard_size=3, shard_bytes=10**9, classes=None):
    lost, sizes = [], {"shard_size": shard_size, "shard_bytes": shard_bytes}
    splits = {
        name: write_split(iter_sample_files(source.split(name), lost), out / name, **sizes) for name in source.splits
    }
    write_manifest(out, splits, classes)
    return lost


def write_captions(root):
    """Captions of every kind that tables can hold, beside images of several formats."""
    colors = {"a.png": "red", "b/a.png": "blue", "a.jpg": "lime", "c.gif": "black", "d.webp": "white", "e.bmp": "gray"}
    colors |= {"f.tif": "pink", "x.y.png": "teal", "漢.png": "gold"}
    for name, color in colors.items():
        picture(root / name, color)
    (root / "wrong.png").write_bytes((root / "a.jpg").read_bytes())
    odd = ["two\nlines", 'with "quotes", and a comma', "漢字 😀", "tab\there", "a < b & c"]
    splits = zip([*colors, "wrong.png"], ["train"] * 7 + ["val", "test", "train"], strict=True)
    rows = [{"image": name, "caption": [*odd, name], "split": split} for name, split in splits]
    return captions(root, "\n".join(map(json.dumps, rows)), "captions.jsonl")


def back(out, needs, **options):
    return Shards(root=str(out), needs=(needs,), **options)


def check_same(ours, theirs):
    assert content(ours) == content(theirs)
    assert ours.splits == theirs.splits
    for name in theirs.splits:
        pairs = list(zip(ours.split(name).records(), theirs.split(name).records(), strict=True))
        assert all(a.id == b.id and a.image() == b.image() for a, b in pairs)


def test_captions_images_and_order_come_back(tmp_path):
    source, out = write_captions(tmp_path / "data"), tmp_path / "out"
    assert write(source, out) == []
    found = back(out, "captions")
    assert found.skipped == found.repeated == []
    check_same(found, source)
    for record in found.split("train").records():
        assert record.read_file() == (tmp_path / "data" / record.id).read_bytes()
    members = [entry.member for path in sorted(out.glob("train/*.tar")) for entry in build_index(str(path)).records()]
    kinds = [name.partition(".")[2] for name in members]
    assert kinds == ["png", "png", "jpg", "gif", "webp", "bmp", "tif", "jpg"]  # by what they are
    drawn = back(out, "captions", captions_per_image=2).split("train")
    files = captions(tmp_path / "data", path=str(tmp_path / "data" / "captions.jsonl"), captions_per_image=2)
    for epoch in range(3):
        assert drawn.record(0, epoch)["captions"] == files.split("train").record(0, epoch)["captions"]


def test_other_programs_can_read_them_and_the_manifest_and_the_index_are_true(tmp_path):
    write(write_captions(tmp_path / "data"), tmp_path / "out")
    shards = sorted((tmp_path / "out" / "train").glob("*.tar"))
    assert [path.name for path in shards] == ["000000.tar", "000001.tar", "000002.tar"]
    names = []
    for path in shards:
        with tarfile.open(path) as archive:
            found = archive.getmembers()
            assert all(member.isreg() and member.mtime == 0 and member.uid == 0 for member in found)
            names += [member.name for member in found]
            for member in found:
                if member.name.endswith(".txt"):
                    lines = archive.extractfile(member).read().decode().split("\n")
                    assert lines[0] == "two lines" and len(lines) == 6
    # The files of a sample stand together, as streaming readers need them.
    keys = [name.partition(".")[0] for name in names]
    assert keys == [f"{n:09d}" for n in range(8) for _ in range(3)]
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    entries = [entry for split in manifest["splits"].values() for entry in split]
    assert sum(entry["samples"] for entry in entries) == 10
    for entry in entries:
        path = tmp_path / "out" / entry["file"]
        data = path.read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert path.with_name(path.name + ".index").read_bytes() == build_index(str(path)).to_bytes()
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".tmp"]


@pytest.mark.parametrize(("size", "limit", "counts"), [(2, 10**9, [2, 2, 2, 2]), (100, 1, [1] * 8), (100, 10**9, [8])])
def test_shards_end_at_so_many_samples_or_bytes(tmp_path, size, limit, counts):
    write(write_captions(tmp_path / "data"), tmp_path / "out", shard_size=size, shard_bytes=limit)
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert [entry["samples"] for entry in manifest["splits"]["train"]] == counts


def test_classes_come_back(tmp_path):
    names = [f"{split}/{name}/{n}.png" for split in ("train", "val") for name in ("cat", "dog", "e1") for n in range(3)]
    lay_out(tmp_path / "data", *names)
    folder, tar = ClassFolders(root=str(tmp_path / "data")), pack(tmp_path / "data.tar", tmp_path / "data")
    for name, source in {"folder": folder, "tar": ClassFolders(path=str(tar)), "drawn": ShapeClasses(**DRAWN)}.items():
        write(source, tmp_path / name, classes=source.classes)
        found = back(tmp_path / name, "label")
        assert found.classes == source.classes
        check_same(found, source)


def test_parts_of_a_split_and_images_that_are_gone(tmp_path):
    split = write_captions(tmp_path / "data").split("train")
    (tmp_path / "data" / "a.jpg").unlink()
    lost = []
    kept = SplitSubset(split, [7, 2, 0])
    entries = write_split(iter_sample_files(kept, lost), tmp_path / "out" / "train", shard_size=9, shard_bytes=10**9)
    write_manifest(tmp_path / "out", {"train": entries}, None)
    assert len(lost) == 1 and "a.jpg: No such file" in lost[0]
    assert list(content(back(tmp_path / "out", "captions"))["train"]) == ["wrong.png", "a.png"]


def test_a_write_that_fails_leaves_no_shard(tmp_path, monkeypatch):
    source = write_captions(tmp_path / "data")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        write(source, tmp_path / "out")
    assert os.listdir(tmp_path / "out" / "train") == []

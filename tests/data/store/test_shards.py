"""Shards are read where they lie, each sample found by its place; what is hostile in them is refused or told."""

import json
import os
import shutil
import struct
import tarfile
from functools import partial

import pytest
from caption_data import content, refusal
from class_data import png
from sharded import caption_members, class_members, write_tar

from vlm.data.images.image import ImageError, load_image
from vlm.data.records import collect_errors
from vlm.data.sources.shards import Shards
from vlm.data.store.shards import SUFFIX, build_index, digest

NO_HOLD_OUT = {"val_fraction": 0.0, "test_fraction": 0.0}


def shards(root, **options):
    return Shards(root=str(root), **{**NO_HOLD_OUT, "write_index": True, "needs": ("captions",), **options})


def splits_of(root):
    write_tar(root / "train" / "000000.tar", caption_members(4))
    write_tar(root / "train" / "000001.tar", caption_members(3, first=4))
    write_tar(root / "val" / "000000.tar", caption_members(2, first=7))
    return root


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_reads_what_the_standard_library_reads(tmp_path, form):
    long = "/".join(["long" * 20] * 2)
    path = write_tar(tmp_path / "a.tar", caption_members(5) | {f"{long}.png": png(9), f"{long}.txt": "x"}, form)
    records = list(shards(tmp_path).split("train").records())
    with tarfile.open(path) as archive:
        truth = {member.name: archive.extractfile(member).read() for member in archive}
    assert len(records) == 6
    for record in records:
        name = record.id.removeprefix("a.tar/")
        assert record.read_file() == truth[name] and record.image() == load_image(truth[name])
        assert record["captions"] == [truth[name.replace(".png", ".txt")].decode()]


def test_splits_are_folders_and_names_do_not_change_where_the_data_move(tmp_path):
    source = shards(splits_of(tmp_path / "one"))
    assert source.splits == ("train", "val")
    assert list(content(source)["train"]) == [f"train/00000{n // 4}.tar/{n:09d}.png" for n in range(7)]
    shutil.move(tmp_path / "one", tmp_path / "other")
    assert content(shards(tmp_path / "other")) == content(source)


def test_splits_are_drawn_by_name_where_nothing_says_them(tmp_path):
    shares = {"val_fraction": 0.2, "test_fraction": 0.2}
    write_tar(tmp_path / "0.tar", caption_members(200))
    before = content(shards(tmp_path, **shares))
    assert all(15 < len(before[name]) < 65 for name in ("val", "test")) and sum(map(len, before.values())) == 200
    write_tar(tmp_path / "1.tar", caption_members(100, first=200))
    after = content(shards(tmp_path, **shares))
    assert all(before[name].items() <= after[name].items() for name in before)


def test_patterns_say_which_shards(tmp_path):
    splits_of(tmp_path)
    whole = content(shards(tmp_path))
    braces = shards(tmp_path, path="train/{000000..000001}.tar", val_path=str(tmp_path / "val" / "*.tar"))
    assert content(braces) == whole
    assert len(shards(tmp_path, path="train/00000[1].tar").split("train")) == 3
    assert "data.path=none*.tar: no such shard" in refusal(shards, tmp_path, path="none*.tar")
    assert "data.path: is not set" in refusal(shards, tmp_path, val_path="val/*.tar")
    assert "000002.tar: cannot be read" in refusal(shards, tmp_path, path="train/{000001..000002}.tar")


def test_captions_come_from_lists_then_metadata_then_lines(tmp_path):
    members = {
        **{"a.png": png(1), "a.json": {"caption": "one", "captions": ["two", " two ", "", 3]}, "a.txt": "four"},
        **{"b.jpg": png(2), "b.json": {"caption": "five\nsix", "name": "was/b.jpg"}, "b.txt": "seven"},
        **{"c.webp": png(3), "c.txt": "eight\r\nnine\n"},
        **{"d.png": png(4), "d.json": "no JSON", "d.txt": "\ud7ff漢"},
        **{"e.png": png(5), "e.json": '{"caption": "half \\ud800"}'},
        **{"f.PNG": png(6), "f.TXT": "in capitals"},
        **{"g.png": png(7), "g.JSON": {"captions": [], "caption": None}, "g.txt": "instead of empty ones"},
        **{"h.png": png(8), "h.json": {"caption": ""}, "h.txt": "instead of none"},
        **{"i.png": png(9), "i.json": {"captions": "no list"}, "i.txt": "i"},
    }
    write_tar(tmp_path / "0.tar", members)
    source = shards(tmp_path)
    assert content(source)["train"] == {
        "0.tar/a.png": ["two"],
        "was/b.jpg": ["five six"],
        "0.tar/c.webp": ["eight", "nine"],
        "0.tar/d.png": ["\ud7ff漢"],
        "0.tar/e.png": ["half ?"],
        "0.tar/f.PNG": ["in capitals"],
        "0.tar/g.png": ["instead of empty ones"],
        "0.tar/h.png": ["instead of none"],
        "0.tar/i.png": ["no list"],
    }
    assert len(source.repeated) == 1 and len(source.skipped) == 3
    assert any("d.json: is not a JSON object" in line for line in source.skipped)


def test_what_cannot_be_used_is_told(tmp_path):
    members = {
        **caption_members(2),
        **{"x.png": png(), "y.txt": "no image", "z.a.png": png(), "w.jpg": png(), "w.png": png(), "w.txt": "w"},
        **{"v.png": png(), "v.txt": b"\xff", "u.png": png(), "u.txt": b"a" * (2**20 + 1), "readme.md": "x"},
    }
    write_tar(tmp_path / "0.tar", members)
    told = ["x.png: has no caption", "y: has no image", "z.a.png: is ignored", "w.png: its sample already has one"]
    told += ["v.txt: is not UTF-8", "u.txt: has 1,048,577 bytes"]
    for _ in range(2):  # by a new index, and by the one that was left
        source = shards(tmp_path)
        assert len(source.split("train")) == 3 and len(source.skipped) == 8
        assert all(line in "\n".join(source.skipped) for line in told)
    assert {line.kind for line in source.skipped} == {"", "no caption", "no image"}


def test_the_index_is_made_once_where_it_may_be_left_and_anew_for_another_tar(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "0.tar", caption_members(3))
    index = tmp_path / ("0.tar" + SUFFIX)
    first = content(shards(tmp_path, write_index=False))
    assert os.listdir(tmp_path) == ["0.tar"] and content(shards(tmp_path)) == first
    stamp = index.stat().st_mtime_ns
    assert content(shards(tmp_path)) == first and index.stat().st_mtime_ns == stamp
    write_tar(path, caption_members(3, first=5))  # of the same size, but newer
    os.utime(path, ns=(stamp + 1, stamp + 1))
    assert list(content(shards(tmp_path))["train"].values()) == [[f"caption {n}"] for n in (5, 6, 7)]
    index.unlink()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert len(shards(tmp_path).split("train")) == 3 and os.listdir(tmp_path) == ["0.tar"]


def sign(line, rest, **change):
    """An index with a digest that fits, whatever else is wrong with it."""
    return json.dumps({**json.loads(line), "digest": digest(rest), **change}).encode() + b"\n" + rest


def test_a_damaged_index_is_made_anew(tmp_path):
    path = write_tar(tmp_path / "0.tar", caption_members(3))
    size = path.stat().st_size
    whole = build_index(str(path)).to_bytes()
    line, _, rest = whole.partition(b"\n")
    places = list(struct.unpack("<9q", rest[:72]))
    outside = [[places[0], size, *places[2:]], [-1, *places[1:]], [*places[:8], 2**62], [2**63 - 1, *places[1:]]]
    bad = [b"", b"{}", whole[:-1], whole[:200], line + b"\n", b"[" * 100_000, b"\n" + rest, rest]
    bad += [sign(line, rest, samples=count) for count in (10**10, -1, "3", True)]
    bad += [
        sign(line, rest, tar=size + 1),
        sign(line, rest, format=1),
        whole.replace(b"caption 1", b"caption 7"),
    ]
    bad += [sign(line, struct.pack("<9q", *values) + rest[72:]) for values in outside]
    changes = [(b'["caption 1"]', b'"caption 1..."'), (b"[]", b"[3]"), (b"[]", b"{}"), (b"[]", b"[[1, 2]]")]
    bad += [sign(line, rest.replace(*change)) for change in changes]
    assert sign(line, rest) == whole
    for data in bad:
        (tmp_path / "0.tar.index").write_bytes(data)
        split = shards(tmp_path).split("train")
        assert [split.record(i)["captions"] for i in range(3)] == [[f"caption {n}"] for n in range(3)]
        assert split.record(2).image() == load_image(png(2))
    assert (tmp_path / "0.tar.index").read_bytes() == whole


def header(name, **about):
    member = tarfile.TarInfo(name)
    for key, value in about.items():
        setattr(member, key, value)
    return member


def _pax(path, size):
    """A header whose extension claims so many bytes."""
    with open(path, "wb") as file:
        file.write(header("x", type=tarfile.XHDTYPE, size=size).tobuf())
        file.truncate(2**30)  # which takes no room on disk


def _write_nested(path):
    with open(path, "wb") as file:
        name = b"a.png".ljust(512, b"\0")
        file.write((header("x", type=tarfile.GNUTYPE_LONGNAME, size=6).tobuf() + name) * 3000 + bytes(1024))


def _negative(path):
    data = bytearray(header("a.png", size=0).tobuf())
    data[124:136] = b"\xff" * 10 + b"\xfc\x00"  # in base 256: back to where it begins
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    path.write_bytes(bytes(data) + bytes(1024))


def _beyond(path):
    path.write_bytes(header("a.png", size=10**9).tobuf() + bytes(1024))


@pytest.mark.parametrize(
    "make", [partial(_pax, size=2**30 - 512), partial(_pax, size=2**40), _write_nested, _negative, _beyond]
)
def test_headers_that_ask_for_too_much_are_refused(tmp_path, make):
    make(tmp_path / "0.tar")
    assert "0.tar: cannot be read as a tar" in refusal(shards, tmp_path)


def test_a_shard_that_is_not_whole_is_refused_or_told(tmp_path):
    whole = write_tar(tmp_path / "0.tar", caption_members(3)).read_bytes()
    write_tar(tmp_path / "1.tar", caption_members(3, first=3))
    for end in (600, len(whole) - 10240 + 200):  # tests/data/sources/test_class_folders.py has all places
        (tmp_path / "0.tar").write_bytes(whole[:end])
        assert "0.tar: cannot be read as a tar" in refusal(shards, tmp_path)
    with collect_errors():
        source = shards(tmp_path)
    assert len(source.split("train")) == 3 and "0.tar: cannot" in source.check_archives()[0][0]


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    path = write_tar(tmp_path / "0.tar", caption_members(2) | {"bad.png": b"no image", "bad.txt": "bad"})
    *_, last, bad = shards(tmp_path).split("train").records()
    with pytest.raises(ImageError, match=rf"^{path}/bad\.png: damaged"):
        bad.image()
    with open(path, "r+b") as file:
        file.truncate(600)
    with pytest.raises(ImageError, match=r"000000001\.png: the tar is truncated inside this file"):
        last.image()
    path.unlink()
    with pytest.raises(ImageError, match=r"000000001\.png: No such file"):
        last.image()


def test_a_sample_that_is_there_twice_is_refused(tmp_path):
    splits_of(tmp_path)
    assert "is in" in refusal(shards, tmp_path, path="train/000000.tar", val_path="train/*.tar")
    twice = {
        f"{n}.{kind}": data
        for n in "ab"
        for kind, data in {"png": png(), "json": {"name": "x", "caption": "c"}}.items()
    }
    write_tar(tmp_path / "named" / "0.tar", twice)
    assert "x is in" in refusal(shards, tmp_path / "named")


def test_refusals_name_the_key_and_the_remedy(tmp_path):
    for place in (tmp_path, tmp_path / "absent"):
        assert "set data.root to the folder of the shards" in refusal(shards, place)
    write_tar(tmp_path / "0.tar", {"a.png": png()})
    assert "no image with captions" in refusal(shards, tmp_path)
    assert "val_fraction=1" in refusal(shards, tmp_path, val_fraction=1)


MANIFEST = {"format": 1, "splits": {"train": [{"file": "train/000000.tar", "bytes": 1, "sha256": ""}]}}
OUTSIDE = [{"train": [{"file": name, "bytes": 1, "sha256": ""}]} for name in ("../0.tar", "/0.tar")]
NO_SPLITS = [*OUTSIDE, {}, {"train": 3}, {"train": [], "more": []}]
NO_MANIFESTS = [[], *(MANIFEST | change for change in ({"format": 2}, {"classes": [1]}))]
NO_MANIFESTS += [MANIFEST | {"splits": splits} for splits in NO_SPLITS]


@pytest.mark.parametrize("text", ["no JSON", *map(json.dumps, NO_MANIFESTS)])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    splits_of(tmp_path)
    (tmp_path / "shards.json").write_text(text)
    assert "shards.json: is not a valid manifest" in refusal(shards, tmp_path)


def of_classes(root, *labels, **options):
    write_tar(root / "0.tar", class_members(*labels))
    return shards(root, needs=("label",), **options)


def labels(source, name="train"):
    return [record["label"] for record in source.split(name).records()]


def test_classes_are_numbers_and_names(tmp_path):
    source = of_classes(tmp_path / "a", "2", "0", "02", "3\n")
    assert source.classes == ["0", "1", "2", "3"] and labels(source) == [2, 0, 2, 3]
    assert source.split("train").record(1).image() == load_image(png(1))
    source = of_classes(tmp_path / "b", "dog", "cat", "dog")
    assert source.classes == ["cat", "dog"] and labels(source) == [1, 0, 1]


def test_each_class_keeps_its_share(tmp_path):
    source = of_classes(tmp_path, *"ab" * 20, val_fraction=0.25, test_fraction=0.25)
    counts = {name: [labels(source, name).count(label) for label in (0, 1)] for name in source.splits}
    assert counts == {"train": [10, 10], "val": [5, 5], "test": [5, 5]}


def test_refusals_of_classes(tmp_path):
    assert "1 classes" in refusal(of_classes, tmp_path / "a", "x", "x")
    assert "100,000" in refusal(of_classes, tmp_path / "b", "999999", "1")
    write_tar(tmp_path / "d" / "0.tar", class_members("z", first=7))
    assert "has class 'z'" in refusal(of_classes, tmp_path, "a", "b", path="0.tar", val_path="d/0.tar")

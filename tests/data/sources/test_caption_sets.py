"""Flickr8k and COCO, small ones made here and the real one where it is."""

import json
import os
from pathlib import Path

import pytest
from captioned import NO_HOLD_OUT, content, picture, refusal

from vlm.data.sources.captions import Coco, Flickr8k

PROJECT = Path(__file__).resolve().parents[3]
SHARED = Path(os.environ.get("VLM_SHARED_DATA", PROJECT.parent / "shared" / "data"))


def flickr(root, images="images", texts="."):
    for number in range(1, 5):
        picture(root / images / f"{number}.jpg")
    folder = root / texts
    folder.mkdir(exist_ok=True)
    rows = [f"{image}.jpg#{k}\tCaption {k} of {image} .\n" for image in range(1, 5) for k in range(5)]
    (folder / "Flickr8k.token.txt").write_text("".join([*rows, "gone.jpg.1#0\tNo image .\n"]))
    for name, image in (("train", "1"), ("dev", "2"), ("test", "3")):
        (folder / f"Flickr_8k.{name}Images.txt").write_text(f"{image}.jpg\n")
    return root


@pytest.mark.parametrize("images, texts", [("images", "."), ("Flicker8k_Dataset", "Flickr8k_text")])
def test_flickr8k(tmp_path, images, texts):
    source = Flickr8k(root=str(flickr(tmp_path, images, texts)))
    told = {image: [f"Caption {k} of {image} ." for k in range(5)] for image in (1, 2, 3)}
    assert content(source) == {"train": {"1.jpg": told[1]}, "val": {"2.jpg": told[2]}, "test": {"3.jpg": told[3]}}
    assert source.split("train").record(0).image().size == (4, 3)
    assert len(source.skipped) == 1 and "gone.jpg.1" in source.skipped[0]


def test_faults_of_flickr8k_are_named(tmp_path):
    assert "data.root" in refusal(Flickr8k, root=str(tmp_path / "none"))
    assert str(tmp_path / "images") in refusal(Flickr8k, root=str(tmp_path))
    flickr(tmp_path)
    splits = tmp_path / "Flickr_8k.devImages.txt"
    splits.write_text("2.jpg\n1.jpg\n")
    assert "1.jpg is in train too" in refusal(Flickr8k, root=str(tmp_path))
    splits.write_text("2.jpg\n99.jpg\n")
    assert any("99.jpg has no caption" in line for line in Flickr8k(root=str(tmp_path)).skipped)
    splits.unlink()
    message = refusal(Flickr8k, root=str(tmp_path))
    assert str(splits) in message and "data.root" in message
    flickr(tmp_path)
    (tmp_path / "images" / "1.jpg").unlink()
    assert "1 of 3" in refusal(Flickr8k, root=str(tmp_path))
    (tmp_path / "Flickr8k.token.txt").write_text("1.jpg#0\tfine\n1.jpg a caption\n")
    assert "line 2" in refusal(Flickr8k, root=str(tmp_path))


@pytest.mark.skipif(not (SHARED / "flickr8k").is_dir(), reason=f"no Flickr8k in {SHARED} (set VLM_SHARED_DATA)")
def test_the_real_flickr8k():
    source = Flickr8k(root=str(SHARED / "flickr8k"))
    records = [list(source.split(name).records()) for name in source.splits]
    assert [len(split) for split in records] == [6000, 1000, 1000]
    every = [record for split in records for record in split]
    counts = [len(record["references"]) for record in every]
    assert len({record.id for record in every}) == 8000
    assert set(counts) <= {3, 4, 5} and sum(counts) > 39_900  # a few images repeat a caption
    assert len(source.skipped) == 1 and "2258277193_586949ec62.jpg.1" in source.skipped[0]
    assert every[-1].image().size == (128, 128)


def coco(path, names, captions_per_image=2, first=0):
    numbered = list(enumerate(names, first))
    images = [{"id": id, "file_name": name, "width": 4, "height": 3} for id, name in numbered]
    annotations = [
        {"id": 10 * id + k, "image_id": id, "caption": f"caption {k} of {name}\n"}
        for k in range(captions_per_image)
        for id, name in numbered
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": annotations, "info": {}}))
    return path


def both(name):
    return [f"caption 0 of {name}", f"caption 1 of {name}"]


@pytest.mark.parametrize("year", [2014, 2017])
@pytest.mark.parametrize("prefix", ["", "images/"])
def test_the_official_layout_of_coco(tmp_path, year, prefix):
    told = {}
    for split, name in (("train", "1.jpg"), ("val", "2.jpg")):
        picture(tmp_path / prefix / f"{split}{year}" / name)
        coco(tmp_path / "annotations" / f"captions_{split}{year}.json", [name], first=int(name[0]))
        told[split] = {f"{prefix}{split}{year}/{name}": both(name)}
    source = Coco(root=str(tmp_path))
    assert content(source) == told and source.split("val").record(0).image().size == (4, 3)


def test_one_annotation_file_beside_its_images(tmp_path):
    names = [f"{index}.png" for index in range(100)]
    for name in names:
        picture(tmp_path / "set" / name)
    coco(tmp_path / "set" / "captions.json", names)
    source = Coco(root=str(tmp_path / "set"), path="captions.json", val_fraction=0.2, test_fraction=0.2)
    assert source.splits == ("train", "val", "test")
    held = [pair for images in content(source).values() for pair in images.items()]
    assert sorted(held) == sorted((name, both(name)) for name in names)
    # Named from outside, the file and its images are found all the same.
    outside = Coco(root=str(tmp_path), path=str(tmp_path / "set" / "captions.json"), **NO_HOLD_OUT)
    assert outside.split("train").record(0).id == "set/0.png"
    assert outside.split("train").record(0).image()


def test_karpathys_splits(tmp_path):
    images, told = [], []
    for index, split in enumerate(("train", "restval", "val", "test")):
        folder = "train2014" if index == 0 else "val2014"
        picture(tmp_path / folder / f"{index}.jpg")
        sentences = [{"raw": f"Number {index}. ", "tokens": []}, {"raw": "A picture.", "tokens": []}]
        images.append({"filepath": folder, "filename": f"{index}.jpg", "split": split, "sentences": sentences})
        told.append((f"{folder}/{index}.jpg", [f"Number {index}.", "A picture."]))
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    assert content(Coco(root=str(tmp_path))) == {
        "train": dict(told[:2]),
        "val": dict(told[2:3]),
        "test": dict(told[3:]),
    }
    # The same of other data sets has no folder in its names.
    for image in images:
        del image["filepath"]
        picture(tmp_path / "images" / image["filename"])
    (tmp_path / "dataset_other.json").write_text(json.dumps({"images": images}))
    source = Coco(root=str(tmp_path), path="dataset_other.json")
    assert list(content(source)["test"]) == ["images/3.jpg"]


def test_what_coco_files_lose_is_named(root):
    file = coco(root / "a.json", ["a.png", "b.png"], captions_per_image=0)
    captions = [(5, 0, "fine"), (6, 77, "of no image"), (7, 0, " ")]
    rows = [{"id": id, "image_id": image, "caption": caption} for id, image, caption in captions]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"annotations": rows}))
    source = Coco(root=str(root), path="a.json", **NO_HOLD_OUT)
    assert content(source) == {"train": {"a.png": ["fine"]}}
    said = ("annotation 6: names no image", "annotation 7: no caption", "image 1: no caption")
    assert source.skipped == [f"{file}, {line}" for line in said]


IMAGE = {"id": 1, "file_name": "a.png"}
REFUSED = [
    *((text, "not a COCO captions file") for text in ("{", "[]", "7", "[" * 100_000)),
    (r'{"images": [{"id": 1, "file_name": "\ud800.png"}]}', r"\ud800 is half of a surrogate pair"),
    ({}, "'images'"),
    ({"images": [IMAGE]}, "'annotations'"),
    ({"images": [{"id": 1, "file_name": 5}], "annotations": []}, "5"),
    ({"images": [], "annotations": []}, "no image with a caption"),
]


@pytest.mark.parametrize(("content", "part"), REFUSED)
def test_faults_of_coco_files_are_named(root, content, part):
    (root / "a.json").write_text(content if isinstance(content, str) else json.dumps(content))
    message = refusal(Coco, root=str(root), path="a.json")
    assert str(root / "a.json") in message and part in message


def test_a_folder_without_coco_says_what_it_looked_for(tmp_path):
    message = refusal(Coco, root=str(tmp_path))
    assert str(tmp_path / "annotations" / "captions_train2017.json") in message and "data.root" in message

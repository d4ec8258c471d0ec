"""Sources of captioned images: tables and folders of one's own, and every fault of them."""

import json

import pytest
from caption_data import NO_HOLD_OUT, captions, content, picture, refusal
from shared_data import SHARED, needs_shared

from vlm.data.sources.captions import Captions, Coco, Flickr8k


def test_a_csv_of_captions(root):
    source = captions(root, "image,caption\na.png,a cat\nb.png,a dog\na.png, two cats \n")
    assert content(source) == {"train": {"a.png": ["a cat", "two cats"], "b.png": ["a dog"]}}
    split = source.split("train")
    assert len(split) == 2 and not split.fresh and source.skipped == []
    assert split.record(1).read_file() == (root / "b.png").read_bytes()
    assert split.record(0, 5).image().getpixel((0, 0)) == (255, 0, 0)
    assert split.record(0)["captions"] == split.record(0, 9)["captions"] == ["a cat", "two cats"]


def test_a_caption_is_one_line(root):
    """A line break has no piece of its own, so that it would be spelled in bytes and be written by the model."""
    written = ["two\nlines", "of\r\nWindows", "a\ttab", "no\u00a0break", "of\u3000Chinese", " \n ends \u2028 here\n\n"]
    lines = ["two lines", "of Windows", "a tab", "no break", "of Chinese", "ends here"]
    table = "image,caption\n" + "".join(f'a.png,"{text}"\n' for text in written)
    rows = "\n".join(json.dumps({"image": "a.png", "caption": text}) for text in written)
    for text, name in ((table, "t.csv"), (rows, "t.jsonl")):
        assert content(captions(root, text, name)) == {"train": {"a.png": lines}}


def test_other_languages_and_a_byte_order_mark(root):
    picture(root / "σκύλος.png")
    text = "\ufeffεικόνα,λεζάντα\nσκύλος.png,ένας σκύλος τρέχει\na.png,一只猫坐在垫子上\n"
    source = captions(root, text, image_column="εικόνα", caption_column="λεζάντα")
    assert content(source) == {"train": {"σκύλος.png": ["ένας σκύλος τρέχει"], "a.png": ["一只猫坐在垫子上"]}}


def test_images_outside_of_the_root(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "d.png"
    picture(elsewhere)
    source = captions(root, f"image,caption\n{elsewhere},far\na.png,near\n")
    assert content(source) == {"train": {str(elsewhere): ["far"], "a.png": ["near"]}}


def test_the_path_as_given_or_within_the_root_which_is_by_default_its_folder(root, monkeypatch):
    (root / "inside.csv").write_text("image,caption\na.png,inside\n")
    assert content(Captions(path=str(root / "inside.csv"), **NO_HOLD_OUT)) == {"train": {"a.png": ["inside"]}}
    monkeypatch.chdir(root.parent)
    for path in ("inside.csv", f"{root.name}/inside.csv"):
        source = Captions(root=root.name, path=path, **NO_HOLD_OUT)
        assert content(source) == {"train": {"a.png": ["inside"]}}
        assert source.split("train").record(0).image().size == (4, 3)


def test_empty_fields_are_skipped_and_named(root):
    source = captions(root, "image,caption\na.png,x\na.png,  \n,lost\nb.png\n\nc.png,z,\n")
    assert content(source) == {"train": {"a.png": ["x"], "c.png": ["z"]}}
    said = ("line 3: no caption", "line 4: names no image", "line 5: no caption")
    assert source.skipped == [f"{root / 'captions.csv'}, {line}" for line in said]
    source = captions(root, '{"image": "a.png", "caption": []}\n{"image": "b.png", "caption": "x"}\n', "t.jsonl")
    assert source.skipped == [f"{root / 't.jsonl'}, line 1: no caption"]


def test_objects_may_write_a_key_in_several_ways(root):
    """A key is looked up in each object, so that two ways of writing it are not two columns."""
    rows = '{"image": "a.png", "Caption": "x"}\n{"image": "b.png", "caption ": "y"}\n'
    assert content(captions(root, rows, "t.jsonl")) == {"train": {"a.png": ["x"], "b.png": ["y"]}}


def test_wrong_places_are_named(root):
    assert "data.root" in refusal(Captions, root=str(root / "nowhere"))
    assert "data.path" in refusal(Captions, root=str(root / "a.png"))
    assert "data.root, data.path: neither is set" in refusal(Captions)
    message = refusal(captions, root, path="none.csv")
    assert "data.path=none.csv" in message and str(root / "none.csv") in message
    assert "data.val_path=none.csv" in refusal(captions, root, "image,caption\na.png,x\n", val_path="none.csv")
    assert refusal(captions, root, path="caption.csv").endswith(f"; did you mean {root / 'captions.csv'}?")
    assert ".csv, .tsv, .txt, .jsonl, .ndjson, .json" in refusal(captions, root, "x", "captions.xlsx")
    (root / "val.csv").write_text("image,caption\nb.png,y\n")
    assert "data.path" in refusal(captions, root, val_path="val.csv")
    message = refusal(captions, root, "image,caption\na.png,x\n", split_column="fold")
    assert "'fold'" in message and "data.source.split_column" in message


# A folder of images beside text files


def test_a_folder_of_pairs(root):
    message = refusal(captions, root)
    assert ".txt" in message and "data.path" in message
    picture(root / "deep" / "er" / "a.PNG")
    (root / "deep" / "er" / "a.txt").write_text("eine Katze", encoding="utf-8")
    (root / "b.txt").write_bytes("\ufeffun chien\r\nun autre chien\r\n".encode())
    (root / "c.txt").write_text("one\n\ntwo\n\n\n")
    (root / "a.txt").write_text("")
    (root / "notes.txt").write_text("not a caption")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.txt").touch()
    (root / "alone.jpg").touch()
    source = captions(root)
    told = {"b.png": ["un chien", "un autre chien"], "c.png": ["one", "two"], "deep/er/a.PNG": ["eine Katze"]}
    assert content(source) == {"train": told}
    assert set(source.skipped) == {
        f"{root / 'alone.jpg'}: has no alone.txt",
        f"{root / 'notes.txt'}: has no image",
        f"{root}, c.txt line 2: no caption",
        f"{root}, a.txt line 1: no caption",
    }
    (root / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    assert f"{root / 'a.txt'}, line 2" in refusal(captions, root)


def test_folders_named_as_splits_are_the_splits(tmp_path):
    for split in ("train", "valid", "test"):
        picture(tmp_path / split / "a.jpg")
        (tmp_path / split / "a.txt").write_text(split)
    assert content(captions(tmp_path, val_fraction=0.9)) == {
        "train": {"train/a.jpg": ["train"]},
        "val": {"valid/a.jpg": ["valid"]},
        "test": {"test/a.jpg": ["test"]},
    }


LONG = "a cat, " * 20_000 + "end"  # Python's own reader takes 131,072 characters of a cell
TWO = {"a.png": ["a cat, asleep"], "b.png": ["a dog"]}
PLAIN, QUOTED = "a.png\ta cat, asleep\nb.png\ta dog\n", 'a.png,"a cat, asleep"\nb.png,a dog\n'
ENDS = ("\r\n", "\r")
# Tables as people have them: the name, the text, and what is read of it.
TABLES = [
    ("t.csv", "image;caption\n" + PLAIN.replace("\t", ";"), TWO),
    ("t.csv", "image\tcaption\n" + PLAIN, TWO),
    ("t.csv", '"image"|"caption"\n"a.png"|"a cat, asleep"\nb.png|a dog\n', TWO),
    ("t.csv", "Image, CAPTION\n" + QUOTED, TWO),
    ("t.txt", "image\tcaption\n" + PLAIN, TWO),
    ("t.txt", "image,caption\n" + QUOTED, TWO),
    ("t.csv", "file_name,text\n" + QUOTED, TWO),
    (
        "t.jsonl",
        '{"file_name": "a.png", "text": "a cat, asleep"}\n{"file_name": "b.png", "text": "a dog", "id": 7}',
        TWO,
    ),
    ("t.json", '[{"image": "a.png", "caption": ["a cat, asleep"]},\n{"Image": "b.png", "Caption": "a dog"}]', TWO),
    ("t.tsv", "id\tcaption\timage\n1\ta cat, asleep\ta.png\n2\ta dog\tsub/../b.png\n", TWO),
    *(("t.csv", ("image,caption\n" + QUOTED).replace("\n", end), TWO) for end in ENDS),
    ("t.csv", "\n\nimage,caption\na.png,a cat\n", {"a.png": ["a cat"]}),
    ("t.csv", f'image,caption\na.png,"{LONG}"\n', {"a.png": [LONG]}),
    (
        "t.csv",
        'image,caption\na.png,"says ""stop"", twice"\na.png,l\'été — 3 €',
        {"a.png": ['says "stop", twice', "l'été — 3 €"]},
    ),
    ("t.csv", "file_name,image,Caption,caption,text\nx,a.png,no,a cat,no\n", {"a.png": ["a cat"]}),
    ("t.csv", "image,caption\na.png,x\n./a.png,x\nROOT/a.png,y\n a.png ,x\n", {"a.png": ["x", "y"]}),
    (
        "t.jsonl",
        '{"image": "a.png", "caption": ["a", "b\u2028c"]}\n\n{"image": "a.png", "caption": "a"}',
        {"a.png": ["a", "b c"]},
    ),
]


@pytest.mark.parametrize(("name", "text", "read"), TABLES, ids=range(len(TABLES)))
def test_tables_as_people_have_them(root, name, text, read):
    assert content(captions(root, text.replace("ROOT", str(root)), name)) == {"train": read}


HEAD = b"image,caption\n"
REFUSED = [
    (
        "t.csv",
        b"photo;words\na.png;x\n",
        ["no columns 'image' and 'caption' among 'photo;words'", "source.image_column and"],
    ),
    ("t.csv", b"a.png,a cat\n", ["first line has no column names; insert the line 'image, caption' above it"]),
    ("t.tsv", b"1\ta cat on a mat\n", ["first line has no column names", "insert the line 'image, caption' above it"]),
    ("t.csv", b"", ["is empty; it needs the columns 'image' and 'caption'"]),
    ("t.csv", b"image,caption,caption\na.png,x,y\n", ["2 columns 'caption'", "rename"]),
    ("t.csv", HEAD, ["no image with a caption", "data.path"]),
    ("t.csv", HEAD + b"a.png,\n", ["no image with a caption", "line 2: no caption"]),
    ("t.csv", "image,caption\na.png,ok\n".encode("utf-16"), ["line 1", "UTF-8"]),
    ("t.csv", HEAD + b"a.png,a cat, sitting\n", ["line 2", "3 fields", "quotes"]),
    ("t.csv", HEAD + b'a.png,"a cat\nb.png,a dog\n', ["line 3", "quotes"]),
    ("t.csv", HEAD + b'a.png,"Stop" sign\n', ["line 2", "quotes"]),
    ("t.csv", HEAD + b"a.png,x\nimages/no.png,y\n", ["1 of 2", "ROOT/images/no.png", "data.root"]),
    ("t.csv", b"image,caption,split\na.png,x,train\nb.png,y,\n", ["line 3", "''"]),
    ("t.jsonl", b'{"image": "a.png", "caption": "x", "split": null}\n', ["line 1", "split"]),
    ("t.jsonl", b"[" * 100_000 + b"\n", ["line 1", "JSON"]),
    ("t.json", b'{"image": "a.png"}', ["not an array of objects"]),
    ("t.json", b"[", ["not JSON"]),
]


@pytest.mark.parametrize(("name", "text", "parts"), REFUSED, ids=range(len(REFUSED)))
def test_faults_of_tables_are_named(root, name, text, parts):
    message = refusal(captions, root, text, name)
    assert str(root / name) in message
    assert all(part.replace("ROOT", str(root)) in message for part in parts), message


def test_names_of_splits_are_normalised(root):
    names = ["train", "Training", "restval", "val", "VALID", "validation", "dev", "test", " testing"]
    for index in range(len(names)):
        picture(root / f"{index}.png")
    rows = "".join(f"{index}.png,text {index},{name}\n" for index, name in enumerate(names))
    found = content(captions(root, "image,caption,fold\n" + rows, split_column="fold"))
    held = {split: [int(name[0]) for name in images] for split, images in found.items()}
    assert held == {"train": [0, 1, 2], "val": [3, 4, 5, 6], "test": [7, 8]}


def test_one_image_by_an_absolute_and_a_relative_name_is_one(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    (root / "two.csv").write_text(f"image,caption,split\n{root / 'a.png'},x,train\na.png,y,test\n")
    message = refusal(Captions, root=root.name, path="two.csv", val_fraction=0, test_fraction=0)
    assert "is in two splits, train and test" in message


def test_an_image_of_two_files_is_refused(root):
    (root / "train.csv").write_text("image,caption\na.png,x\n")
    (root / "test.csv").write_text("image,caption\nc.png,x\n./a.png,leak\n")
    message = refusal(captions, root, path="train.csv", test_path="test.csv")
    assert "test.csv, line 3: ./a.png is in two splits, train and test" in message


@pytest.fixture
def many(tmp_path):
    for index in range(600):
        (tmp_path / f"{index}.png").touch()  # no test that uses it reads an image
    return tmp_path


def table(count):
    return "image,caption\n" + "".join(f"{i}.png,text {k} of {i}\n" for k in range(2) for i in range(count))


def test_fractions_are_by_image_and_the_same_wherever_the_folder_is_and_whatever_is_added(many, monkeypatch):
    shares = {"val_fraction": 0.2, "test_fraction": 0.1}
    whole, part = (content(captions(many, table(count), **shares)) for count in (600, 300))
    sizes = {split: len(images) for split, images in whole.items()}
    assert sum(sizes.values()) == 600  # no image in two
    assert abs(sizes["val"] - 120) < 30 and abs(sizes["test"] - 60) < 23  # three standard deviations
    for name, texts in [pair for images in whole.values() for pair in images.items()]:
        assert texts == [f"text {k} of {name[:-4]}" for k in range(2)]
    assert all(set(images) <= set(whole[split]) for split, images in part.items())
    more = content(captions(many, table(600), val_fraction=0.4))
    assert set(whole["val"]) < set(more["val"])  # more of one split takes nothing from the others' start
    assert content(captions(many, table(300), **shares, seed=1)) != part
    monkeypatch.chdir(many)
    assert content(Captions(root=".", path="captions.csv", **shares)) == part


def test_captions_per_image_draws_anew_in_every_epoch_of_train_alone(root):
    rows = "".join(
        f"{image},text {k},{split}\n" for image, split in (("a.png", "train"), ("b.png", "val")) for k in range(5)
    )
    source = captions(root, "image,caption,split\n" + rows, captions_per_image=2)
    train, every = source.split("train"), [f"text {k}" for k in range(5)]
    drawn = [tuple(train.record(0, epoch)["captions"]) for epoch in range(40)]
    assert all(len(set(some)) == 2 and list(some) == sorted(some) for some in drawn)
    assert {text for some in drawn for text in some} == set(every)
    assert drawn == [tuple(source.split("train").record(0, epoch)["captions"]) for epoch in range(40)]
    assert train.record(0)["references"] == source.split("val").record(0)["captions"] == every


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


@pytest.mark.slow
@needs_shared("flickr8k")
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


def both_captions(name):
    return [f"caption 0 of {name}", f"caption 1 of {name}"]


@pytest.mark.parametrize("year", [2014, 2017])
@pytest.mark.parametrize("prefix", ["", "images/"])
def test_the_official_layout_of_coco(tmp_path, year, prefix):
    told = {}
    for split, name in (("train", "1.jpg"), ("val", "2.jpg")):
        picture(tmp_path / prefix / f"{split}{year}" / name)
        coco(tmp_path / "annotations" / f"captions_{split}{year}.json", [name], first=int(name[0]))
        told[split] = {f"{prefix}{split}{year}/{name}": both_captions(name)}
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
    assert sorted(held) == sorted((name, both_captions(name)) for name in names)
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
REFUSED_COCO = [
    *((text, "not a COCO captions file") for text in ("{", "[]", "7", "[" * 100_000)),
    (r'{"images": [{"id": 1, "file_name": "\ud800.png"}]}', r"\ud800 is half of a surrogate pair"),
    ({}, "'images'"),
    ({"images": [IMAGE]}, "'annotations'"),
    ({"images": [{"id": 1, "file_name": 5}], "annotations": []}, "5"),
    ({"images": [], "annotations": []}, "no image with a caption"),
]


@pytest.mark.parametrize(("content", "part"), REFUSED_COCO)
def test_faults_of_coco_files_are_named(root, content, part):
    (root / "a.json").write_text(content if isinstance(content, str) else json.dumps(content))
    message = refusal(Coco, root=str(root), path="a.json")
    assert str(root / "a.json") in message and part in message


def test_a_folder_without_coco_says_what_it_looked_for(tmp_path):
    message = refusal(Coco, root=str(tmp_path))
    assert str(tmp_path / "annotations" / "captions_train2017.json") in message and "data.root" in message

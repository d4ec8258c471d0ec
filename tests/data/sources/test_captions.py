"""Sources of captioned images: tables and folders of one's own, and every fault of them."""

import json

import pytest
from captioned import NO_HOLD_OUT, captions, content, picture, refusal

from vlm.data.sources.captions import Captions

# Tables


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

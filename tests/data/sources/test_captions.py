"""Sources of captioned images: tables and folders of one's own, and every fault of them."""

import csv
import json

import pytest
from captioned import NO_HOLD_OUT, captions, content, picture, refusal

from vlm.data.images.image import ImageError
from vlm.data.sources.captions import Captions
from vlm.errors import UserError

# Tables


def test_a_csv_of_captions(root):
    source = captions(root, "image,caption\na.png,a cat\nb.png,a dog\na.png, two cats \n")
    assert source.splits == ("train",)
    assert content(source) == {"train": {"a.png": ["a cat", "two cats"], "b.png": ["a dog"]}}
    split = source.split("train")
    assert len(split) == 2
    assert not split.fresh
    assert split.record(1).read_file() == (root / "b.png").read_bytes()
    assert split.record(0, 5).image().getpixel((0, 0)) == (255, 0, 0)
    assert split.record(0)["captions"] == split.record(0, 9)["captions"] == ["a cat", "two cats"]
    assert source.skipped == []


def test_blank_lines_may_stand_before_a_header(root):
    assert content(captions(root, "\n\nimage,caption\na.png,a cat\n")) == {"train": {"a.png": ["a cat"]}}


def test_quotes_commas_and_newlines_survive_the_csv(root):
    texts = ['says "stop", twice', "one line\nand another", "comma, and; tab\t.", "l'été — 3 €"]
    with (root / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([["image", "caption"], *(["a.png", text] for text in texts)])
    assert content(captions(root, path="captions.csv")) == {"train": {"a.png": texts}}


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_of_every_system(root, newline):
    source = captions(root, newline.join(["image,caption", "a.png,one", "b.png,two", ""]))
    assert content(source) == {"train": {"a.png": ["one"], "b.png": ["two"]}}


def test_a_caption_of_a_csv_may_be_long(root):
    """Python's own reader takes 131,072 characters of a cell."""
    text = "a cat, " * 20_000 + "end"
    assert content(captions(root, f'image,caption\na.png,"{text}"\n')) == {"train": {"a.png": [text]}}


def test_other_languages_and_a_byte_order_mark(root):
    picture(root / "σκύλος.png")
    text = "\ufeffεικόνα,λεζάντα\nσκύλος.png,ένας σκύλος τρέχει\na.png,一只猫坐在垫子上\n"
    source = captions(root, text, image_column="εικόνα", caption_column="λεζάντα")
    assert content(source) == {"train": {"σκύλος.png": ["ένας σκύλος τρέχει"], "a.png": ["一只猫坐在垫子上"]}}
    assert source.split("train").record(0).image().size == (4, 3)


def test_a_tsv_with_other_columns_around(root):
    text = "id\tcaption\timage\n1\ta cat, sitting\ta.png\n2\ta dog\tsub/../b.png\n"
    assert content(captions(root, text, "t.tsv")) == {"train": {"a.png": ["a cat, sitting"], "b.png": ["a dog"]}}


def test_json_lines_with_one_or_many_captions(root):
    records = [
        {"image": "a.png", "caption": "a cat"},
        {"image": "b.png", "caption": ["a dog", "perro\u2028marrón"]},
        {"image": "a.png", "caption": "a cat"},
    ]
    text = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    source = captions(root, text, "t.jsonl")
    assert content(source) == {"train": {"a.png": ["a cat"], "b.png": ["a dog", "perro\u2028marrón"]}}


def test_equal_rows_are_merged_however_the_image_is_spelt(root):
    text = f"image,caption\na.png,x\n./a.png,x\n{root}/a.png,y\n a.png ,x\n"
    assert content(captions(root, text)) == {"train": {"a.png": ["x", "y"]}}


def test_images_outside_of_the_root(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "d.png"
    picture(elsewhere)
    source = captions(root, f"image,caption\n{elsewhere},far\na.png,near\n")
    assert content(source) == {"train": {str(elsewhere): ["far"], "a.png": ["near"]}}


def test_the_path_as_given_or_within_the_root(root, monkeypatch):
    (root / "inside.csv").write_text("image,caption\na.png,inside\n")
    monkeypatch.chdir(root.parent)
    for path in ("inside.csv", f"{root.name}/inside.csv"):
        source = Captions(root=root.name, path=path, **NO_HOLD_OUT)
        assert content(source) == {"train": {"a.png": ["inside"]}}
        assert source.split("train").record(0).image().size == (4, 3)


def test_empty_fields_are_skipped_and_named(root):
    source = captions(root, "image,caption\na.png,x\na.png,  \n,lost\nb.png\n\nc.png,z,\n")
    assert content(source) == {"train": {"a.png": ["x"], "c.png": ["z"]}}
    file = root / "captions.csv"
    assert source.skipped == [
        f"{file}, line 3: no caption",
        f"{file}, line 4: names no image",
        f"{file}, line 5: no caption",
    ]


def test_a_few_absent_images_are_skipped_and_named(root):
    for index in range(200):
        picture(root / f"{index}.png")
    rows = "".join(f"{index}.png,text\n" for index in range(202))
    source = captions(root, "image,caption\n" + rows)
    assert len(source.split("train")) == 200
    assert [line.split(":")[0] for line in source.skipped] == [str(root / "200.png"), str(root / "201.png")]


def test_many_absent_images_are_an_error(root):
    message = refusal(captions, root, "image,caption\na.png,x\nimages/no.png,y\n")
    assert "1 of 2" in message
    assert str(root / "images/no.png") in message
    assert "data.root" in message


FAULTS = {
    "missing column": (b"file,text\na.png,x\n", ["'image'", "'file', 'text'", "data.source.image_column"]),
    "missing caption column": (b"image,words\na.png,x\n", ["'caption'", "'words'", "data.source.caption_column"]),
    "no header": (b"a.png,a cat\n", ["'image'", "'a.png'"]),
    "empty file": (b"", ["is empty; a table has the columns 'image' and 'caption'"]),
    "two columns of a name": (b"image,caption,caption\na.png,x,y\n", ["2 columns 'caption'", "rename"]),
    "only a header": (b"image,caption\n", ["no image with a caption", "data.path"]),
    "only empty captions": (b"image,caption\na.png,\n", ["no image with a caption", "line 2: no caption"]),
    "latin-1": ("image,caption\na.png,ok\nb.png,caf\xe9\n".encode("latin-1"), ["line 3", "UTF-8"]),
    "utf-16": ("image,caption\na.png,ok\n".encode("utf-16"), ["line 1", "UTF-8"]),
    "unquoted comma": (b"image,caption\na.png,a cat, sitting\n", ["line 2", "3 fields", "quotes"]),
    "open quote": (b'image,caption\na.png,"a cat\nb.png,a dog\n', ["line 3", "quotes"]),
    "stray quote": (b'image,caption\na.png,"Stop" sign\n', ["line 2", "quotes"]),
    "unknown split": (b"image,caption,split\na.png,x,train\nb.png,y,holdout\n", ["line 3", "'holdout'", "train"]),
    "empty split": (b"image,caption,split\na.png,x,train\nb.png,y,\n", ["line 3", "''"]),
    "in two splits": (b"image,caption,split\na.png,x,train\na.png,y,test\n", ["line 3", "a.png", "train", "test"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_csv_are_named(root, fault):
    text, parts = FAULTS[fault]
    message = refusal(captions, root, text)
    assert str(root / "captions.csv") in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b'{"image": "a.png"}\n', ["line 1", "'caption'", "'image'"]),
        (b'{"image": "a.png", "caption": "x"}\n{"image": \n', ["line 2", "JSON"]),
        (b'["a.png", "x"]\n', ["line 1", "object"]),
        (b'{"image": "a.png", "caption": 7}\n', ["line 1", "text"]),
        (b'{"image": "a.png", "caption": ["x", null]}\n', ["line 1", "text"]),
        (b'{"image": "a.png", "caption": "x", "split": null}\n', ["line 1", "split"]),
        (b"[" * 100_000 + b"\n", ["line 1", "JSON"]),
        (
            b'{"image": "a.png", "caption": "x", "split": "val"}\n{"image": "b.png", "caption": "y"}\n',
            ["b.png", "has no split"],
        ),
    ],
)
def test_faults_of_json_lines_are_named(root, text, parts):
    message = refusal(captions, root, text, "t.jsonl")
    for part in ("t.jsonl", *parts):
        assert part in message


def test_a_list_without_captions_is_named(root):
    source = captions(root, '{"image": "a.png", "caption": []}\n{"image": "b.png", "caption": "x"}\n', "t.jsonl")
    assert source.skipped == [f"{root / 't.jsonl'}, line 1: no caption"]


def test_wrong_places_are_named(root):
    assert "data.root" in refusal(Captions, root=str(root / "nowhere"))
    assert "data.path" in refusal(Captions, root=str(root / "a.png"))
    message = refusal(captions, root, path="none.csv")
    assert "data.path=none.csv" in message
    assert str(root / "none.csv") in message
    assert "data.val_path=none.csv" in refusal(captions, root, "image,caption\na.png,x\n", val_path="none.csv")
    assert ".csv, .tsv, .txt, .jsonl, .ndjson, .json" in refusal(captions, root, "x", "captions.xlsx")
    (root / "val.csv").write_text("image,caption\nb.png,y\n")
    assert "data.path" in refusal(captions, root, val_path="val.csv")


def test_an_explicit_split_column_must_be_there(root):
    message = refusal(captions, root, "image,caption\na.png,x\n", split_column="fold")
    assert "'fold'" in message
    assert "data.source.split_column" in message


def test_a_broken_image_is_an_error_when_it_is_read(root):
    (root / "b.png").write_bytes(b"text")
    split = captions(root, "image,caption\na.png,x\nb.png,y\n").split("train")
    assert split.record(0).image()
    with pytest.raises(ImageError, match=r"b\.png"):
        split.record(1).image()


# A folder of images beside text files


def test_a_folder_of_pairs(tmp_path):
    picture(tmp_path / "b.jpg")
    (tmp_path / "b.txt").write_bytes("\ufeffun chien\r\nun autre chien\r\n".encode())
    picture(tmp_path / "deep" / "er" / "a.PNG")
    (tmp_path / "deep" / "er" / "a.txt").write_text("eine Katze", encoding="utf-8")
    picture(tmp_path / "alone.jpg")
    (tmp_path / "notes.txt").write_text("not a caption")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").touch()
    source = captions(tmp_path)
    assert content(source) == {"train": {"b.jpg": ["un chien", "un autre chien"], "deep/er/a.PNG": ["eine Katze"]}}
    assert source.skipped == [
        f"{tmp_path / 'alone.jpg'}: no alone.txt beside it",
        f"{tmp_path / 'notes.txt'}: no image beside it",
    ]


def test_blank_lines_and_empty_text_files_are_named(tmp_path):
    for name, text in (("a", "one\n\ntwo\n\n\n"), ("b", "")):
        picture(tmp_path / f"{name}.jpg")
        (tmp_path / f"{name}.txt").write_text(text)
    source = captions(tmp_path)
    assert content(source) == {"train": {"a.jpg": ["one", "two"]}}
    assert source.skipped == [f"{tmp_path}, a.txt line 2: no caption", f"{tmp_path}, b.txt line 1: no caption"]


def test_folders_named_as_splits_are_the_splits(tmp_path):
    for split in ("train", "valid", "test"):
        picture(tmp_path / split / "a.jpg")
        (tmp_path / split / "a.txt").write_text(split)
    assert content(captions(tmp_path, val_fraction=0.9)) == {
        "train": {"train/a.jpg": ["train"]},
        "val": {"valid/a.jpg": ["valid"]},
        "test": {"test/a.jpg": ["test"]},
    }


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    picture(tmp_path / "elsewhere" / "a.jpg")
    (tmp_path / "elsewhere" / "a.txt").write_text("linked")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(tmp_path / "root")
    assert content(captions(tmp_path / "root")) == {"train": {"link/a.jpg": ["linked"]}}


def test_a_folder_without_pairs_says_what_it_takes(root):
    message = refusal(captions, root)
    assert ".txt" in message
    assert "data.path" in message


def test_text_that_is_not_utf8_is_named(tmp_path):
    picture(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    assert f"{tmp_path / 'a.txt'}, line 2" in refusal(captions, tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "image;caption\na.png;a cat, asleep\nb.png;a dog\n"),
        ("t.csv", "image\tcaption\na.png\ta cat, asleep\nb.png\ta dog\n"),
        ("t.csv", '"image"|"caption"\n"a.png"|"a cat, asleep"\nb.png|a dog\n'),
        ("t.csv", 'Image, CAPTION\na.png,"a cat, asleep"\nb.png,a dog\n'),
        ("t.txt", "image\tcaption\na.png\ta cat, asleep\nb.png\ta dog\n"),
        ("t.txt", 'image,caption\na.png,"a cat, asleep"\nb.png,a dog\n'),
        ("t.csv", 'file_name,text\na.png,"a cat, asleep"\nb.png,a dog\n'),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": "a cat, asleep"}\n{"file_name": "b.png", "text": "a dog", "id": 7}\n',
        ),
        ("t.json", '[{"image": "a.png", "caption": ["a cat, asleep"]},\n{"Image": "b.png", "Caption": "a dog"}]'),
    ],
)
def test_tables_as_people_have_them(root, name, text):
    assert content(captions(root, text, name)) == {"train": {"a.png": ["a cat, asleep"], "b.png": ["a dog"]}}


def test_a_column_of_the_exact_name_comes_before_its_synonym(root):
    text = "file_name,image,Caption,caption,text\nx,a.png,no,a cat,no\n"
    assert content(captions(root, text)) == {"train": {"a.png": ["a cat"]}}


def test_all_missing_columns_are_named_at_once(root):
    assert refusal(captions, root, "photo;words\na.png;a cat\n").endswith(
        "captions.csv: no columns 'image' and 'caption' among 'photo;words'; set data.source.image_column and "
        "data.source.caption_column to the right ones"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"image": "a.png"}', "not an array of objects"), ("[1]", "object 1: not a JSON object"), ("[", "not JSON")],
)
def test_json_that_is_no_table(root, text, words):
    assert words in refusal(captions, root, text, "t.json")


def test_the_root_is_by_default_the_tables_folder(root):
    (root / "captions.csv").write_text("image,caption\na.png,a cat\n")
    assert content(Captions(path=str(root / "captions.csv"), **NO_HOLD_OUT)) == {"train": {"a.png": ["a cat"]}}


def test_a_misspelt_table_gets_the_nearest_file(root):
    (root / "captions.csv").write_text("image,caption\na.png,a cat\n")
    assert refusal(captions, root, path="caption.csv").endswith(f"; did you mean {root / 'captions.csv'}?")


def test_neither_root_nor_path():
    with pytest.raises(UserError, match=r"data\.root: missing, and data\.path too"):
        Captions()

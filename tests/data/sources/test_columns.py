"""Parquet and Arrow tables and folders of `datasets`, as sources of images and of texts read them."""

import json
import pickle

import pytest
from caption_data import NO_HOLD_OUT, content, picture, png_of, refusal

from vlm.data.images.image import ImageError
from vlm.data.records import NAMES
from vlm.data.sources.captions import Captions
from vlm.data.sources.class_folders import ImageTable
from vlm.data.sources.questions import QuestionTable
from vlm.data.sources.text_tables import TextTable, TranslationTable
from vlm.data.store import columns
from vlm.data.store.columns import open_columns
from vlm.data.store.shard_sets import iter_sample_files

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
COLORS = ["red", "green", "blue", "white"]


def photos(colors=COLORS, *, bare=False, **more):
    """A table of images inside, two captions each, as `datasets` lays the feature Image out."""
    cells = [png_of(color) if bare else {"bytes": png_of(color), "path": "0.png"} for color in colors]
    return pa.table({"image": cells, "caption": [[f"{color} one", f"a {color}"] for color in colors], **more})


def stream(path, table):
    """A file as `datasets` writes it: a stream of batches without an index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def name_classes(table, *names):
    """The table with the names of its classes, as `datasets` writes them."""
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def save_tables(folder, tables):
    """A folder as `DatasetDict.save_to_disk` writes it, each split in two files."""
    names = [f"data-{part:05d}-of-00002.arrow" for part in range(2)]
    for split, table in tables.items():
        half = len(table) // 2
        for name, part in zip(names, (table[:half], table[half:]), strict=True):
            stream(folder / split / name, part)
        state = {"_data_files": [{"filename": name} for name in names], "_split": split}
        (folder / split / "state.json").write_text(json.dumps(state))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(tables)}))
    return str(folder)


def test_labels_that_are_no_class(tmp_path):
    """In `datasets`, -1 stands for an unknown label, such as in test sets."""
    for number, labels in enumerate(([0, 1, -1, None], [0, 1, 2, 0])):
        table = name_classes(pa.table({"text": list("abcd"), "label": pa.array(labels, pa.int64())}), "neg", "pos")
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    source = TextTable(path=str(tmp_path / "0.parquet"), **NO_HOLD_OUT)
    assert content(source) == {"train": {"row 0": "neg", "row 1": "pos"}} and source.classes == ["neg", "pos"]
    assert [line.partition(", ")[2] for line in source.skipped] == ["row 2: no label", "row 3: no label"]
    message = refusal(TextTable, path=str(tmp_path / "1.parquet"), **NO_HOLD_OUT)
    assert "1.parquet, row 2: label 2 is not the number of one of its 2 classes" in message


def pixel(record):
    return record.image().getpixel((0, 0))


RGB = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather", "bytes"])
def test_images_inside_of_a_table(tmp_path, kind):
    path = tmp_path / f"all.{'parquet' if kind == 'bytes' else kind}"
    table = photos(bare=kind == "bytes", split=["train", "train", "validation", "train"])
    if kind == "arrow":
        stream(path, table)
    elif kind == "feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    else:
        parquet.write_table(table, path, row_group_size=3)
    source = Captions(path=str(path))
    train = {f"{path.name}/{row}": [f"{color} one", f"a {color}"] for row, color in enumerate(COLORS)}
    val = {f"{path.name}/2": train.pop(f"{path.name}/2")}
    assert content(source) == {"train": train, "val": val} and not source.skipped
    for one in (source, pickle.loads(pickle.dumps(source))):  # as a worker that is not forked has it
        assert [pixel(record) for record in one.split("train").records()] == [RGB[c] for c in ("red", "green", "white")]
    assert len({record.read_stamp() for record in source.split("train").records()}) == 3
    lost = []
    ((_, files),) = iter_sample_files(source.split("val"), lost)
    assert (
        source.split("val").record(0).read_file() == png_of("blue") and (".png", png_of("blue")) in files and not lost
    )


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    folder = save_tables(tmp_path / "set", {"train": photos(), "test": photos(["blue", "red"])})
    stream(tmp_path / "set" / "train" / "cache-12.arrow", photos(["white"]))  # left there by another program
    source = Captions(path=folder)
    assert source.splits == ("train", "test") and len(source.split("train")) == 4
    assert list(content(source)["test"]) == [f"test/data-0000{part}-of-00002.arrow/0" for part in range(2)]
    assert [pixel(record) for record in source.split("train").records()] == [RGB[color] for color in COLORS]
    part = Captions(path=f"{folder}/train", val_path=f"{folder}/test")
    assert part.splits == ("train", "val") and len(part.split("val")) == 2


def test_files_named_as_on_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    for name, color in {"train-00000-of-00002": "red", "train-00001-of-00002": "blue", "validation": "green"}.items():
        parquet.write_table(photos([color]), tmp_path / "data" / f"{name}.parquet")
    source = Captions(path=str(tmp_path))
    found = [[pixel(record) for record in source.split(name).records()] for name in ("train", "val")]
    assert found == [[RGB["red"], RGB["blue"]], [RGB["green"]]]


def test_images_beside_a_table(tmp_path, root):
    rows = {"file_name": ["a.png", "a.png", "b.png", "c.png"], "text": ["one", "two", None, "three"]}
    parquet.write_table(pa.table(rows), root / "metadata.parquet")
    source = Captions(path=str(root / "metadata.parquet"), **NO_HOLD_OUT)
    assert content(source) == {"train": {"a.png": ["one", "two"], "c.png": ["three"]}}
    assert source.skipped == [f"{root / 'metadata.parquet'}, row 2: no caption"]
    cells = pa.array([{"bytes": None, "path": "b.png"}], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    parquet.write_table(pa.table({"image": cells, "caption": ["named alone"]}), root / "named.parquet")
    record = Captions(path=str(root / "named.parquet"), **NO_HOLD_OUT).split("train").record(0)
    assert pixel(record) == RGB["red"] and record.id == "named.parquet/0"


def test_texts_with_names_of_classes(tmp_path):
    table = name_classes(pa.table({"text": ["x", "y", "z", "v"], "label": [1, 0, 1, None]}), "bad", "good")
    source = TextTable(path=save_tables(tmp_path / "set", {"train": table, "validation": table}))
    assert source.splits == ("train", "val") and source.classes == ["bad", "good"]
    rows = [(record["text"], record["class"], record["label"]) for record in source.split("train").records()]
    assert rows == [("x", "good", 1), ("y", "bad", 0), ("z", "good", 1)]
    assert len({record.id for record in source.split("train").records()}) == 3 and len(source.skipped) == 2
    parquet.write_table(table, tmp_path / "all.parquet")
    assert TextTable(path=str(tmp_path / "all.parquet"), val_fraction=0.3, test_fraction=0).classes == ["bad", "good"]


def test_translations_and_questions(tmp_path):
    rows = pa.table({"en": ["a", "b"], "de": ["x", "y"], "split": ["train", "test"]})
    parquet.write_table(rows, tmp_path / "p.parquet")
    source = TranslationTable(path=str(tmp_path / "p.parquet"), text_column="en", translation_column="de")
    known = [dict(source.split(name).record(0).values) for name in source.splits]
    assert known == [{"text": "a", "translation": "x"}, {"text": "b", "translation": "y"}]
    asked = pa.table({"image": [png_of("blue")] * 2, "question": ["what?"] * 2, "answer": ["blue", "sea"]})
    parquet.write_table(asked, tmp_path / "q.parquet")
    questions = QuestionTable(path=str(tmp_path / "q.parquet"), **NO_HOLD_OUT)
    assert [record["questions"][0].answer for record in questions.split("train").records()] == ["blue", "sea"]
    assert pixel(questions.split("train").record(1)) == RGB["blue"]


def test_row_groups_are_kept_up_to_a_bound(tmp_path, monkeypatch):
    parquet.write_table(photos(), tmp_path / "a.parquet", row_group_size=1)
    monkeypatch.setattr(columns, "CACHE_BYTES", 2 * len(png_of("red")) + 40)
    table = open_columns(tmp_path / "a.parquet")
    for row in (0, 1, 2, 3, 0):
        assert table.cell("image", row)["bytes"] == png_of(COLORS[row])
    groups = [group for path, _, group in columns._row_groups if path == tmp_path / "a.parquet"]
    assert groups == [3, 0]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_damaged_table_is_one_line(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    parquet.write_table(photos(), path) if suffix == "parquet" else stream(path, photos())
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"image,caption\n", b""):
        path.write_bytes(damaged)
        message = refusal(Captions, path=str(path))
        assert message.startswith(f"{path}: cannot be read (") and "fetch or save it again" in message


def test_damage_within_is_an_image_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(photos(["red"]), path, compression="none", use_dictionary=False, write_statistics=False)
    source = Captions(path=str(path), **NO_HOLD_OUT)
    data = path.read_bytes()
    at = data.index(png_of("red"))
    path.write_bytes(data[:at] + b"????" + data[at + 4 :])
    open_columns.cache_clear()
    with pytest.raises(ImageError, match=r"a\.parquet/0: damaged, or not an image"):
        source.split("train").record(0).image()


def test_folders_that_are_no_data_set(tmp_path):
    folder = save_tables(tmp_path / "set", {"train": photos()})
    (tmp_path / "set" / "train" / "state.json").write_text('{"_data_files": [{"filename": "../../a.arrow"}]}')
    assert "state.json: is damaged" in refusal(Captions, path=folder)
    (tmp_path / "set" / "dataset_dict.json").write_text("[" * 100_000)
    assert "dataset_dict.json: is damaged" in refusal(Captions, path=folder)
    (tmp_path / "none").mkdir()
    assert "is a folder without tables" in refusal(Captions, path=str(tmp_path / "none"))
    parquet.write_table(photos(), tmp_path / "a.parquet")
    message = refusal(Captions, path=str(tmp_path / "a.parquet"), caption_column="title")
    assert "no column 'title' among 'image', 'caption'" in message and "data.source.caption_column" in message


def test_images_in_classes(tmp_path, root):
    names = ["cat", "dog"]
    table = name_classes(pa.table({"image": photos()["image"], "label": [0, 1, 1, 0]}), *names)
    source = ImageTable(path=save_tables(tmp_path / "set", {"train": table, "validation": table[:2]}))
    assert source.splits == ("train", "val") and source.classes == names and not source.skipped
    found = [(pixel(record), record["class"], record["label"]) for record in source.split("train").records()]
    assert found == [(RGB[color], names[n], n) for color, n in zip(COLORS, [0, 1, 1, 0], strict=True)]
    assert source.split("val").record(1).read_file() == png_of("green")
    (root / "names.csv").write_text("image,label\na.png,x\nb.png,y\nsub/../c.png,x\n")
    beside = ImageTable(path=str(root / "names.csv"), val_fraction=0)
    assert [pixel(record) for record in beside.split("train").records()] == [RGB["red"]] * 3
    (root / "names.csv").write_text("image,label\na.png,x\nd.png,y\n")
    assert "1 of 2 images are missing" in refusal(ImageTable, path=str(root / "names.csv"), val_fraction=0)
    (root / "names.csv").write_text("image,label\na.png,x\nb.png,y\n./a.png,y\n")
    assert "has another label or split in line 2" in refusal(ImageTable, path=str(root / "names.csv"))


def test_images_in_classes_are_drawn_by_their_names(root):
    names, splits = [f"{number}.png" for number in range(41)], []
    for name in names:
        picture(root / name)
    for some in (names[:40], names):
        rows = [f"{name},{'xy'[number % 2]}\n" for number, name in enumerate(some)] * 3
        (root / "names.csv").write_text("image,label\n" + "".join(rows[::-1]))
        source = ImageTable(path=str(root / "names.csv"), val_fraction=0.2, test_fraction=0.2)
        train, val, test = ({record.read_file.args[0] for record in source.split(name).records()} for name in NAMES)
        assert (len(val), len(test)) == (8, 8) and not train & (val | test) and not val & test
        splits.append(test)
    assert len(splits[0] & splits[1]) >= 7  # one more image moves few


def test_a_null_split_is_none(tmp_path):
    table = pa.table({"text": ["x", "y", "z"], "label": ["a", "b", "a"], "split": pa.array([None] * 3, pa.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert TextTable(path=str(tmp_path / "a.parquet"), **NO_HOLD_OUT).splits == ("train",)
    parquet.write_table(table.set_column(2, "split", pa.array(["train", None, "test"])), tmp_path / "b.parquet")
    assert "only some rows have a split" in refusal(TextTable, path=str(tmp_path / "b.parquet"))

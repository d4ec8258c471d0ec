"""Tables of texts with labels or with translations, and texts in class folders."""

import json

import pytest
from caption_data import NO_HOLD_OUT, refusal
from class_data import pack
from shared_data import SHARED, needs_shared

from vlm.data.sources.class_folders import TextFolders
from vlm.data.sources.text_tables import SST2, TextTable, TranslationTable
from vlm.errors import UserError


def read_rows(source, split):
    return [(r.id, r["text"], r["class"], r["label"]) for r in source.split(split).records()]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_files_of_each_split(tmp_path):
    train = write(tmp_path / "a.csv", 'text,label\n"good, and\nlong",pos\nbad,neg\n')
    test = write(tmp_path / "b.tsv", 'label\tother\ttext\npos\tx\tgood "one"\n'.replace('"', ""))
    source = TextTable(path=train, test_path=test)
    assert source.splits == ("train", "test") and source.classes == ["neg", "pos"] and not source.skipped
    assert read_rows(source, "train") == [("train:3", "good, and\nlong", "pos", 1), ("train:4", "bad", "neg", 0)]
    assert read_rows(source, "test") == [("test:2", "good one", "pos", 1)]


def test_json_lines_with_pairs_and_a_column_of_splits(tmp_path):
    rows = '{"a": "x", "b": "y", "same": true, "split": "dev"}\n{"a": "z", "b": "z", "same": false, "split": "train"}\n'
    rows += '{"a": "v", "b": "w", "same": true, "split": "train"}\n'
    path = write(tmp_path / "t.jsonl", rows)
    source = TextTable(path=path, text_column="a", pair_column="b", label_column="same")
    assert source.splits == ("train", "val") and source.classes == ["False", "True"]
    assert dict(source.split("val").record(0).values) == {"text": "x", "pair": "y", "label": 1, "class": "True"}


def test_lines_without_a_header_are_parted_as_often_as_there_are_columns(tmp_path):
    path = write(tmp_path / "sst", "0 a\u00a0dull film\n1 a  fine one\n\n1 good\r\n")
    source = TextTable(path=path, val_path=path, columns=["label", "text"], delimiter=" ")
    assert read_rows(source, "train") == [
        ("train:1", "a\u00a0dull film", "0", 0),  # a no-break space parts nothing
        ("train:2", "a  fine one", "1", 1),
        ("train:4", "good", "1", 1),
    ]
    message = refusal(TextTable, path=write(tmp_path / "bad", "1 x\n0\n"), columns=["label", "text"], delimiter=" ")
    assert "line 2: 1 cells" in message and "data.source.columns" in message


def test_a_single_file_is_drawn_by_class(tmp_path):
    rows = "".join(f"text {n},{'ab'[n % 4 == 0]}\n" for n in range(200))
    path = write(tmp_path / "t.csv", f"text,label\n{rows}")
    source, again = (TextTable(path=path, val_fraction=0.2, test_fraction=0.1) for _ in range(2))
    labels = {name: [r["class"] for r in source.split(name).records()] for name in source.splits}
    sizes = {name: (found.count("a"), found.count("b")) for name, found in labels.items()}
    assert sizes == {"train": (105, 35), "val": (30, 10), "test": (15, 5)}
    assert read_rows(source, "test") == read_rows(again, "test")
    assert len({r.id for name in source.splits for r in source.split(name).records()}) == 200


def test_labels_that_other_tools_read_as_missing_are_named(tmp_path):
    path = write(tmp_path / "t.csv", "text,label\na,1\nb,2\nc,NA\nd,NA\ne,nan\nf,\n")
    source = TextTable(path=path, **NO_HOLD_OUT)
    assert source.classes == ["1", "2", "NA", "nan"] and source.skipped == [f"{path}, line 7: no label"]
    assert [note.partition(",")[0] for note in source.notes] == [
        f"{path}: the label 'NA' of 2 training rows is treated as a class",
        f"{path}: the label 'nan' of 1 training row is treated as a class",
    ]


JSON = '{"text": "x", "label": "a"}\n'


@pytest.mark.parametrize(
    ("text", "options", "parts"),
    [
        ("text,label\nx,a\n", {}, ["only one label, a"]),
        ("text,label\n", {}, ["no usable sample"]),
        ("text,label\nx,a\ny,b\n", {"pair_column": "other"}, ["'other'", "data.source.pair_column"]),
        ("text,label\nx,a,b\n", {}, ["line 2", "3 fields"]),
        ("text,label,split\nx,a,test\ny,b,test\n", {}, ["has no training samples, only test"]),
        ("text,label\nx,a\ny,b\n", {"test_path": "c.csv"}, ["'c' of test:2 in test is not in train"]),
        ("text,label\nx,a\ny,b\n", {"val_path": "gone.csv"}, ["data.val_path=gone.csv", "no such file"]),
        (
            JSON + JSON.replace("x", r"\uDFff"),
            {},
            [r"line 2: not JSON (\udfff is half of a surrogate pair, not a char"],
        ),
        (JSON.replace("}", ', "split": 3}'), {}, ["line 1: unknown split '3'"]),
    ],
)
def test_faults_are_named(text, options, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "c.csv", "text,label\nx,c\n")
    message = refusal(TextTable, path=write(tmp_path / ("t.jsonl" if text[0] == "{" else "t.csv"), text), **options)
    assert all(part in message for part in parts), message


def test_null_in_json_is_an_empty_cell(tmp_path):
    rows = '{"text": "x", "label": "a", "split": null}\n{"text": null, "label": "a"}\n{"text": "y", "label": "b"}\n'
    path = write(tmp_path / "t.jsonl", rows)
    source = TextTable(path=path, **NO_HOLD_OUT)
    assert [r["text"] for r in source.split("train").records()] == ["x", "y"]
    assert source.skipped == [f"{path}, line 2: no text"]


@pytest.fixture
def reviews(tmp_path):
    for name in ("pos", "neg"):
        (tmp_path / "reviews" / name).mkdir(parents=True)
        for n in range(20):
            write(tmp_path / "reviews" / name / f"cv{n:03d}_1.txt", f"{name} film {n}\nof two lines\n")
    return tmp_path / "reviews"


def test_folders_are_classes(reviews):
    source = TextFolders(root=str(reviews), val_fraction=0.2, test_names="cv01[5-9]*")
    assert source.classes == ["neg", "pos"] and source.splits == ("train", "val", "test")
    assert [len(source.split(name)) for name in source.splits] == [24, 6, 10]
    record = source.split("test").record(0)
    assert record.id == "neg/cv015_1.txt" and record["text"] == "neg film 15\nof two lines" and record["label"] == 0
    assert "image" not in record and record.read_stamp()


def test_faults_of_folders_are_named(reviews, tmp_path):
    (reviews / "pos" / "cv000_1.txt").write_bytes(b"caf\xe9")
    source = TextFolders(root=str(reviews), **NO_HOLD_OUT)
    with pytest.raises(UserError, match=r"cv000_1.txt, line 1: is not UTF-8"):
        list(source.split("train").records())
    (tmp_path / "empty").mkdir()
    message = refusal(TextFolders, root=str(tmp_path / "empty"))
    assert "no text" in message and "CLASS/TEXT" in message


def test_a_tar_of_class_folders(reviews, tmp_path):
    source = TextFolders(path=str(pack(tmp_path / "r.tar", reviews)), test_fraction=0.1)
    assert source.classes == ["neg", "pos"] and "film" in source.split("train").record(0)["text"]


def translations(tmp_path, content, name="pairs.csv", **options):
    return TranslationTable(path=write(tmp_path / name, content), **options)


def pairs(source, split="train"):
    return [(record["text"], record["translation"]) for record in source.split(split).records()]


def test_columns_of_translations_have_names_or_are_given(tmp_path):
    names = {"text_column": "en", "translation_column": "de"}
    source = translations(tmp_path, "de,en,n\nHund,dog,1\nKatze,cat,2\n", **names, **NO_HOLD_OUT)
    assert pairs(source) == [("dog", "Hund"), ("cat", "Katze")]
    rows = [{"text": "a\u00a0b ", "translation": "c\td", "split": split} for split in ("train", "dev", "test")]
    source = translations(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "pairs.jsonl")
    assert source.splits == ("train", "val", "test") and pairs(source, "val") == [("a\u00a0b", "c d")]
    plain = "dog\tHund\ncat\tKatze\n"
    source = translations(tmp_path, plain, "pairs.txt", columns=["text", "translation"], **NO_HOLD_OUT)
    assert pairs(source) == [("dog", "Hund"), ("cat", "Katze")]


def test_a_task_without_labels_reads_tables_that_have_none_or_some(tmp_path):
    lines = [f"text {number}" for number in range(40)]
    for content in (
        "\n".join(["text", *lines]),
        "\n".join(["text,label", *(f"{line}," for line in lines[:-1]), "z,a"]),
    ):
        (path := tmp_path / "t.csv").write_text(content)
        table = TextTable(path=str(path), needs=("text",))
        assert table.holds == ("text",) and table.splits == ("train", "val", "test") and not table.skipped
        assert sum(len(table.split(name)) for name in table.splits) == 40
    (plain := tmp_path / "plain.txt").write_text("It was late.\nIt rained.\n")
    with pytest.raises(UserError, match=f"data=text data.path={plain}"):
        TextTable(path=str(plain), needs=("text",))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stsa.binary.train").write_text("1 a stirring\u00a0film\n0 dull , dull , dull\n", encoding="utf-8")
    (tmp_path / "stsa.binary.dev").write_text("0 a bore\n1 fine\n")
    (tmp_path / "stsa.binary.test").write_text('1 " great "\n0 flat\n')
    (tmp_path / "train_phrases.tsv").write_text('sentence\tlabel\nstirring \t1\nfine . \t1\n" great "\t1\ndull , \t0\n')
    return tmp_path


def read_values(source, split):
    return [(record.id, record["text"], record["class"], record["label"]) for record in source.split(split).records()]


def test_sentences(folder):
    source = SST2(root=str(folder))
    assert source.splits == ("train", "val", "test") and not source.skipped
    assert read_values(source, "train") == [
        ("train:line 1", "a stirring\u00a0film", "positive", 1),
        ("train:line 2", "dull , dull , dull", "negative", 0),
    ]
    assert [row[1:] for row in read_values(source, "test")] == [('" great "', "positive", 1), ("flat", "negative", 0)]


def test_phrases_train_too_but_for_held_out_sentences(folder):
    source = SST2(root=str(folder), phrases=True)
    assert [row[:3] for row in read_values(source, "train")[2:]] == [
        ("train:phrase line 2", "stirring", "positive"),
        ("train:phrase line 5", "dull ,", "negative"),
    ]
    assert [line.split(":")[1] for line in source.skipped] == ["phrase line 3", "phrase line 4"]
    assert "'fine .' has the words of a sentence of val" in source.skipped[0] and "of test" in source.skipped[1]


def test_faults_of_sst2_are_named(folder):
    (folder / "stsa.binary.dev").write_text("0 a bore\n2 fine\n")
    assert "line 2: the label '2' is neither" in refusal(SST2, root=str(folder))
    (folder / "stsa.binary.dev").unlink()
    assert "stsa.binary.dev: no such file; set data.root" in refusal(SST2, root=str(folder))
    assert "no such folder" in refusal(SST2, root=str(folder / "none"))


@pytest.mark.slow
@needs_shared("sst2")
def test_the_real_files():
    source = SST2(root=str(SHARED / "sst2"), phrases=True)
    train, val, test = (list(source.split(name).records()) for name in source.splits)
    assert (len(val), len(test)) == (872, 1821)
    assert not {record["text"] for record in (*val, *test)} & {record["text"] for record in train}
    left_out = [line for line in source.skipped if "phrase line" in line]
    assert sum(record.id.startswith("train:phrase") for record in train) + len(left_out) == 67_349
    assert sum("of test" in line for line in left_out) >= 6
    plain = SST2(root=str(SHARED / "sst2"))
    assert len(plain.split("train")) + len(plain.skipped) == 6_920

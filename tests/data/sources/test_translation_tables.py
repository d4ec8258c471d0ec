"""Tables of texts with their translations."""

import json

import pytest
from captioned import refusal

from vlm.data.sources.text_tables import TranslationTable

NONE = {"val_fraction": 0, "test_fraction": 0}


def table(tmp_path, content, name="pairs.csv", **options):
    path = tmp_path / name
    path.write_text(content)
    return TranslationTable(path=str(path), **options)


def pairs(source, split="train"):
    return [(record["text"], record["translation"]) for record in source.split(split).records()]


def test_columns_have_names(tmp_path):
    source = table(tmp_path, "de,en,n\nHund,dog,1\nKatze,cat,2\n", text_column="en", translation_column="de", **NONE)
    assert pairs(source) == [("dog", "Hund"), ("cat", "Katze")]
    rows = [{"text": "a\u00a0b ", "translation": "c\td", "split": split} for split in ("train", "dev", "test")]
    source = table(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "pairs.jsonl")
    assert source.splits == ("train", "val", "test") and pairs(source, "val") == [("a\u00a0b", "c d")]


def test_lines_without_a_header(tmp_path):
    source = table(tmp_path, "dog\tHund\ncat\tKatze\n", "pairs.txt", columns=["text", "translation"], **NONE)
    assert pairs(source) == [("dog", "Hund"), ("cat", "Katze")]


def test_an_empty_side_is_named(tmp_path):
    source = table(tmp_path, "text,translation\ndog,\n,Katze\nfox,Fuchs\n", **NONE)
    assert pairs(source) == [("fox", "Fuchs")]
    path = tmp_path / "pairs.csv"
    assert source.skipped == [f"{path}, line 2: no translation", f"{path}, line 3: no text"]


@pytest.mark.parametrize(
    "content, name, named",
    [
        ("text,german\na,b\n", "pairs.csv", "data.source.translation_column"),
        ('{"text": "a", "translation": 3}\n', "pairs.jsonl", "line 1: translation 3 is not text"),
    ],
)
def test_faults_are_named(tmp_path, content, name, named):
    assert named in refusal(table, tmp_path, content, name)

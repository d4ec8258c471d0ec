"""Texts of several sources as those of one."""

import pytest

from vlm.data.sources.joined_texts import JoinedTexts
from vlm.data.sources.squad import Squad
from vlm.data.sources.text_folders import TextFolders
from vlm.data.sources.text_tables import TextTable
from vlm.errors import UserError


@pytest.fixture
def folder(tmp_path):
    for name in ("pos/a.txt", "pos/b.txt", "neg/c.txt", "neg/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"a film called {name[4]}\n")
    return TextFolders(root=str(tmp_path), val_names="b*", val_fraction=0, test_fraction=0)


@pytest.fixture
def table(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"text,label\ngood {name},1\n,0\nbad {name},0\n")
    return TextTable(path=str(tmp_path / "train.csv"), test_path=str(tmp_path / "test.csv"), **COLUMNS)


COLUMNS = {"text_column": "text", "pair_column": None, "label_column": "label"}


def test_each_split_has_the_texts_of_all(folder, table):
    joined = JoinedTexts(sources=[folder, table])
    assert joined.splits == ("train", "val", "test")
    texts = {name: [record["text"] for record in joined.split(name).records()] for name in joined.splits}
    train = ["a film called c", "a film called d", "a film called a", "good train", "bad train"]
    assert sorted(texts["train"][:3]) == sorted(train[:3]) and texts["train"][3:] == train[3:]
    assert texts["val"] == ["a film called b"] and texts["test"] == ["good test", "bad test"]
    ids = [record.id for name in joined.splits for record in joined.split(name).records()]
    assert len(set(ids)) == len(ids) == 8
    assert joined.skipped == table.skipped and len(table.skipped) == 2


def test_sources_of_one_name_keep_their_samples_apart(folder):
    ids = [record.id for record in JoinedTexts(sources=[folder, folder]).split("train").records()]
    assert len(set(ids)) == len(ids) == 6


def test_what_holds_no_text_is_refused(tmp_path, folder):
    file = tmp_path / "questions.json"
    file.write_text(
        '{"data": [{"paragraphs": [{"context": "red", "qas": [{"id": "1", "question": "q",'
        ' "answers": [{"text": "red", "answer_start": 0}]}]}]}]}'
    )
    questions = Squad(path=str(file), test_fraction=0, val_fraction=0)
    with pytest.raises(UserError, match=r"data\.source\.sources: .* has no text"):
        JoinedTexts(sources=[folder, questions])
    with pytest.raises(UserError, match=r"data\.source\.sources: is empty"):
        JoinedTexts(sources=[])

"""Texts of several sources as those of one."""

import pytest
from captioned import refusal

from vlm.data.sources.class_folders import TextFolders
from vlm.data.sources.questions import QuestionTable
from vlm.data.sources.text_source import JoinedTexts
from vlm.data.sources.text_tables import TextTable


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
    texts = {name: [record["text"] for record in joined.split(name).records()] for name in joined.splits}
    films = [f"a film called {name}" for name in "acd"]
    assert sorted(texts["train"][:3]) == films and texts["train"][3:] == ["good train", "bad train"]
    assert texts["val"] == ["a film called b"] and texts["test"] == ["good test", "bad test"]
    assert joined.skipped == table.skipped and len(table.skipped) == 2
    for sources in ([folder, table], [folder, folder]):
        joined = JoinedTexts(sources=sources)
        ids = [record.id for name in joined.splits for record in joined.split(name).records()]
        assert len(set(ids)) == len(ids) == 8


def test_what_holds_no_text_is_refused(root, folder):
    (root / "t.csv").write_text("image,question,answer\na.png,q,x\n")
    questions = QuestionTable(path=str(root / "t.csv"), val_fraction=0, test_fraction=0)
    assert "data.source.sources: " in (message := refusal(JoinedTexts, sources=[folder, questions]))
    assert "has no text" in message and "data.source.sources: is empty" in refusal(JoinedTexts, sources=[])

"""Sources of text: every character comes back, in the split where it belongs."""

import re
from itertools import chain
from pathlib import Path

import pytest
from caption_data import refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import SHARED, needs_shared

from vlm.data.shapes.scene_captions import SceneText
from vlm.data.sources.class_folders import TextFolders
from vlm.data.sources.questions import QuestionTable
from vlm.data.sources.text_source import JoinedTexts, TextFiles
from vlm.data.sources.text_tables import TextTable
from vlm.data.text import words as module
from vlm.data.text.words import read_lines
from vlm.errors import UserError

SEPARATORS = ["\n", "\r\n", "\r", "\x0b", "\x1c", "\x85", "\u2028", "\ufeff", "é", "你", "👩", "a"]


def read(source, split):
    return ["".join(record["document"].lines()) for record in source.split(split).records()]


def size(source, split):
    return sum(record["document"].size() for record in source.split(split).records())


def stamps(source):
    """The texts that tell the content of a source, by split."""
    splits = {name: source.split(name).records() for name in source.splits}
    return str({name: [(record.id, record.read_stamp()) for record in records] for name, records in splits.items()})


def put(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return str(folder)


def many(folder, count):
    return put(folder, **{f"{number}_txt": f"text {number}\n" for number in range(count)})


@settings(derandomize=True, max_examples=50)
@given(text=st.text() | st.lists(st.sampled_from(SEPARATORS), max_size=20).map("".join), limit=st.integers(1, 9))
def test_lines_are_all_of_the_text_and_end_at_line_breaks(tmp_path_factory, text, limit):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert list(read_lines(path)) == re.findall(r"[^\n]*\n|[^\n]+", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", limit)
        lines = list(read_lines(path))
    assert "".join(lines) == text
    assert all(line and "\n" not in line[:-1] for line in lines)


@pytest.mark.parametrize("data", [b"one\ntwo\xff\n", b"one\ntwo\xc3\nthree", b"one\ntwo\xe4\xbd"])
@pytest.mark.parametrize("limit", [4, 2**16])
def test_what_is_not_utf8_is_named_with_its_line(data, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", limit)
    (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(UserError, match=r"bad\.txt, line 2: is not UTF-8"):
        list(read_lines(tmp_path / "bad.txt"))


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.txt: No such file"):
        list(read_lines(tmp_path / "gone.txt"))
    source = TextFiles(path=put(tmp_path, a_txt="text") + "/a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"a\.txt: No such file"):
        read(source, "val")


def test_a_file_is_split_as_nanogpt_does(tmp_path):
    text = "".join(f"Zeile {number} mit ä, 你 und 👩\r\n" for number in range(61)) + "kein Ende"
    put(tmp_path, input_txt=text)
    cut = int(len(text) * 0.9)
    for source in (TextFiles(path=f"{tmp_path}/input.txt"), TextFiles(root=str(tmp_path))):  # alone in its folder too
        assert source.splits == ("train", "val")
        assert [read(source, split) for split in source.splits] == [[text[:cut]], [text[cut:]]]


@needs_shared("tinyshakespeare/input.txt")
def test_tinyshakespeare_has_the_numbers_of_nanogpt():
    source = TextFiles(path=str(SHARED / "tinyshakespeare" / "input.txt"))
    assert [len(read(source, split)[0]) for split in ("train", "val")] == [1_003_854, 111_540]


@pytest.mark.parametrize(("val", "test"), [(0.1, 0.1), (0.25, 0.5), (0.3, 0.0)])
def test_the_parts_of_a_file_are_the_whole_in_order(val, test, tmp_path):
    text = "".join(f"{number}\n" for number in range(1000))
    source = TextFiles(path=put(tmp_path, a_txt=text) + "/a.txt", val_fraction=val, test_fraction=test)
    parts = [read(source, split)[0] for split in source.splits]
    assert "".join(parts) == text
    assert source.splits == (("train", "val", "test") if test else ("train", "val"))
    sizes = [1 - val - test, val, test][: len(parts)]
    assert [len(part) / len(text) for part in parts] == pytest.approx(sizes, abs=1e-3)
    assert [size(source, split) for split in source.splits] == pytest.approx([len(part) for part in parts], abs=1)


def test_files_of_their_own_are_taken_whole(tmp_path):
    root = put(tmp_path, a_txt="train\n" * 10, b_txt="val\n", c_txt="test\n")
    train, val, test = (f"{root}/{name}.txt" for name in "abc")
    source = TextFiles(path=train, val_path=val, test_path=test)
    assert [read(source, split) for split in source.splits] == [["train\n" * 10], ["val\n"], ["test\n"]]
    assert TextFiles(path=train, val_path=val, test_fraction=0.5).splits == ("train", "val")
    source = TextFiles(path=train, test_path=val, test_fraction=0.5)
    assert [read(source, split) for split in source.splits] == [["train\n" * 9], ["train\n"], ["val\n"]]


def test_a_folder_is_read_by_file_and_a_file_keeps_its_split(tmp_path):
    root = many(tmp_path, 200)
    source = TextFiles(root=root, val_fraction=0.2, test_fraction=0.1)
    before = {split: read(source, split) for split in source.splits}
    assert sorted(chain(*before.values())) == sorted(f"text {number}\n" for number in range(200))
    assert len(before["val"]) == pytest.approx(40, abs=15) and len(before["test"]) == pytest.approx(20, abs=12)
    many(tmp_path, 220)
    put(tmp_path, deep__er__note_md="deep\n", deep__other_json="no text", _hidden_txt="hidden", empty_txt="")
    source = TextFiles(root=root, val_fraction=0.2, test_fraction=0.1)
    after = {split: read(source, split) for split in source.splits}
    assert all(set(before[split]) <= set(after[split]) for split in before)
    assert sum(map(len, after.values())) == 221
    assert source.skipped == [f"{root}/empty.txt: is empty, or a broken link"]
    assert read(TextFiles(root=root, seed=1), "val") != read(TextFiles(root=root), "val")


@pytest.mark.parametrize("count", [3, 4, 5])
def test_every_split_of_a_small_folder_has_a_file(count, tmp_path):
    root = many(tmp_path, count)
    for seed in range(20):
        for fractions in ((0.01, 0.01), (0.49, 0.49)):
            source = TextFiles(root=root, val_fraction=fractions[0], test_fraction=fractions[1], seed=seed)
            found = [read(source, split) for split in ("train", "val", "test")]
            assert all(found)
            assert sum(map(len, found)) == count


def test_folders_named_as_splits_are_the_splits_and_without_validation_some_of_train_is_held_out(tmp_path):
    root = put(tmp_path, Train__a_txt="a", Train__b__c_txt="c", testing__e_txt="e")
    source = TextFiles(root=root, test_fraction=0.5)
    found = {split: read(source, split) for split in source.splits}
    assert len(found["val"]) == 1 and sorted(found["train"] + found["val"]) == ["a", "c"] and found["test"] == ["e"]
    source = TextFiles(root=put(tmp_path, valid__d_md="d"))
    assert {split: read(source, split) for split in source.splits} == {"train": ["a", "c"], "val": ["d"], "test": ["e"]}
    assert "test" not in TextFiles(root=put(tmp_path, other_txt="o")).splits


def test_links_are_followed_but_not_in_circles(tmp_path):
    put(tmp_path / "elsewhere", a_txt="a")
    root = Path(put(tmp_path / "root", b_txt="b", c__c_txt="c"))
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "c" / "circle").symlink_to(root)
    (root / "dangling.txt").symlink_to(tmp_path / "nowhere.txt")
    source = TextFiles(root=str(root))
    assert sorted(read(source, "train") + read(source, "val")) == ["a", "b", "c"]
    assert source.skipped == [f"{root}/dangling.txt: is empty, or a broken link"]


def test_stamps_tell_content_and_splits_apart(tmp_path):
    root, one = many(tmp_path, 20), f"{tmp_path}/4.txt"
    same = stamps(TextFiles(root=root))
    assert stamps(TextFiles(root=root)) == same
    found = {same, stamps(TextFiles(root=root, seed=1)), stamps(TextFiles(root=root, val_fraction=0.5))}
    (tmp_path / "3.txt").write_text("text 4\n")
    found.add(stamps(TextFiles(root=root)))
    (tmp_path / "3.txt").rename(tmp_path / "three.txt")
    found |= {stamps(TextFiles(root=root)), stamps(TextFiles(path=one)), stamps(TextFiles(path=one, val_fraction=0.2))}
    assert len(found) == 7


GIVE = "data.path, data.root: give one of them"
FAULTS = [
    ({}, GIVE),
    ({"path": "a.txt", "root": "."}, GIVE),
    ({"root": ".", "val_path": "a.txt"}, "data.val_path.*only with data.path"),
    ({"path": "no.txt"}, "data.path=.*no.txt: no such file; set data.path"),
    ({"path": "a.txt", "val_path": "no.txt"}, "data.val_path=.*no.txt: no such file"),
    ({"path": "."}, "data.path=.*: is a folder; give it as data.root"),
    ({"root": "a.txt"}, "data.root=.*: is a file; give it as data.path"),
    ({"root": "no"}, "data.root=.*no: no such folder"),
    ({"path": "empty.txt"}, "data.path=.*empty.txt: is empty"),
    ({"root": "pictures"}, "data.root=.*pictures: has no text"),
    ({"root": "named"}, "data.root=.*named: has folders of splits, but none called train"),
    ({"root": "two", "test_fraction": 0.1}, "2 files are too few for 3 splits"),
    ({"path": "a.txt", "val_fraction": 0.0}, "val_fraction=0.0"),
    ({"path": "a.txt", "val_fraction": 0.5, "test_fraction": 0.5}, "sum below 1"),
]


@pytest.mark.parametrize(("given", "message"), FAULTS, ids=str)
def test_faults_name_the_setting_and_the_remedy(given, message, tmp_path):
    put(tmp_path, a_txt="text", empty_txt="", pictures__a_png="", named__val__a_txt="v")
    put(tmp_path / "two", a_txt="a", b_txt="b")
    paths = {key: str(tmp_path / value) if isinstance(value, str) else value for key, value in given.items()}
    assert re.search(message, refusal(TextFiles, **paths))


def scenes(**options):
    given = {"seed": 0, "shapes": ["circle", "cross", "star"], "colors": ["red", "blue"], "sizes": ["small", "large"]}
    given |= {"max_objects": 2, "scenes": 3, "train_documents": 40, "val_documents": 20, "test_documents": 20}
    return SceneText(**given | options)


def test_scene_texts_are_the_same_again_and_share_no_combination():
    found = {split: read(scenes(), split) for split in SceneText.splits}
    assert found == {split: read(scenes(), split) for split in SceneText.splits}
    assert {split: len(documents) for split, documents in found.items()} == {"train": 40, "val": 20, "test": 20}
    assert all(re.fullmatch(r"((A [a-z ]+\.)( A [a-z ]+\.)?\n){3}", text) for text in chain(*found.values()))
    kinds = re.compile(r"(?:small|large) (?:red|blue) \w+")
    lines = {split: "".join(documents).splitlines() for split, documents in found.items()}
    train, val, test = ({frozenset(kinds.findall(line)) for line in own} for own in lines.values())
    assert not train & val and not train & test and not val & test
    assert len(set(found["train"])) > 30


def test_stamps_of_scene_texts_tell_every_option():
    others = [{"seed": 1}, {"scenes": 4}, {"train_documents": 41}, {"max_objects": 3}, {"shapes": ["circle", "cross"]}]
    found = [stamps(scenes(**options)) for options in ({}, *others, {})]
    assert len(set(found)) == len(others) + 1 and found[0] == found[-1]


def test_lines_are_texts_for_a_task_that_reads_texts(tmp_path):
    lines = [f"line {number}" for number in range(50)]
    (path := tmp_path / "t.txt").write_text("\n\n".join(lines))
    source = TextFiles(path=str(path), needs=("text",))
    texts = {name: [record["text"] for record in source.split(name).records()] for name in source.splits}
    assert texts["train"] + texts["val"] == lines and 4 <= len(texts["val"]) <= 6  # whole lines, none in both
    ids = [record.id for name in source.splits for record in source.split(name).records()]
    assert ids[:2] == ["t.txt:1", "t.txt:3"] and len(set(ids)) == 50
    path.write_text("one line alone")
    with pytest.raises(UserError, match="no line of text is in the split val"):
        TextFiles(path=str(path), needs=("text",)).split("val")


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

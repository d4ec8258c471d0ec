"""One invalid row does not refuse a file: it is skipped, counted and named, up to 1% of the rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captioned import picture, refusal

from vlm.data.records import Source, collect_errors
from vlm.data.sources.captions import Captions, Coco
from vlm.data.sources.class_folders import ImageTable
from vlm.data.sources.questions import Conversations, EasyVQA, QuestionTable
from vlm.data.sources.squad import Squad
from vlm.data.sources.text_tables import TextTable, TranslationTable

ROWS = 200
USER, ASSISTANT = {"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "A cat."}
PARAGRAPH = {"context": "a cat", "qas": [{"id": "x", "question": "what?", "answers": []}]}
QUESTION = {"question": "what?", "answers": [{"text": "cat", "answer_start": 2}]}

VALID: dict[str, Callable[[int], Any]] = {
    "captions": lambda n: {"image": f"{n}.png", "caption": f"caption {n}"},
    "questions": lambda n: {"image": f"{n}.png", "question": "what?", "answer": f"thing {n}"},
    "conversations": lambda n: {"image": f"{n}.png", "conversations": [USER, ASSISTANT]},
    "image_table": lambda n: {"image": f"{n}.png", "label": "ab"[n % 2]},
    "texts": lambda n: {"text": f"text {n}", "label": "ab"[n % 2]},
    "translations": lambda n: {"text": f"text {n}", "translation": f"Satz {n}"},
    "coco": lambda n: {"image_id": n, "id": n, "caption": f"caption {n}"},
    "karpathy": lambda n: {"filename": f"{n}.png", "split": "train", "sentences": [{"raw": f"caption {n}"}]},
    "easy_vqa": lambda n: ["is it red?", "yes", n],
    "squad": lambda n: PARAGRAPH | {"context": f"a cat {n}", "qas": [QUESTION | {"id": str(n)}]},
}
INVALID: dict[str, list[tuple[Any, str]]] = {
    "captions": [
        ({"image": "5.png", "caption": None}, "must be text"),
        ({"image": "5.png", "caption": ["x", 3]}, "must be text"),
        ({"image": "5.png"}, "no column 'caption'"),
        ({"image": "5.png", "caption": "x", "split": "odd"}, "unknown split 'odd'"),
        ("5.png", "not a JSON object"),
    ],
    "questions": [
        ({"image": "5.png", "question": "what?", "answer": None}, "must be text"),
        ({"image": "5.png", "question": "what?"}, "no column 'answer'"),
    ],
    "conversations": [
        ({"image": "5.png", "conversations": [ASSISTANT, USER]}, "an answer has no question before it"),
        ({"image": "5.png", "conversations": [USER, ASSISTANT, ASSISTANT]}, "an answer has no question before it"),
        ({"image": "5.png", "conversations": [USER, ASSISTANT | {"value": None}]}, "the content of a turn is not text"),
        ({"image": "5.png", "conversations": [USER, ASSISTANT | {"from": "bot"}]}, "a turn has the role 'bot'"),
        ({"image": "5.png", "conversations": [USER, ASSISTANT, USER | {"from": "tool"}]}, "a turn has the role 'tool'"),
        ({"image": "5.png", "conversations": [USER, {"value": "x"}]}, "a turn has neither"),
        ({"image": "5.png", "conversations": None}, "not a list of turns"),
        ({"image": 5, "conversations": [USER, ASSISTANT]}, "images and kinds must be text"),
        ({"image": "5.png"}, "no column 'conversations|messages|texts'"),
    ],
    "image_table": [({"image": "5.png", "label": 1.5}, "label 1.5 is not text"), (None, "not a JSON object")],
    "texts": [({"text": 3.5, "label": "a"}, "text 3.5 is not text"), ({"text": "x"}, "no column 'label'")],
    "translations": [({"text": "x", "translation": ["y"]}, "is not text")],
    "coco": [
        ({"image_id": 5, "id": 5, "caption": None}, "'caption' is None"),
        ({"id": 5, "caption": "x"}, "has no 'image_id'"),
        (None, "not a JSON object"),
    ],
    "karpathy": [
        ({"filename": "5.png", "split": "odd", "sentences": []}, "unknown split 'odd'"),
        ({"filename": "5.png", "split": "val", "sentences": [{}]}, "has no 'raw'"),
        ({"split": "val", "sentences": []}, "has no 'filename'"),
    ],
    "easy_vqa": [(["is it red?", None, 5], "is not [question, answer"), ({}, "is not [question, answer")],
    "squad": [
        (None, "is not an object"),
        ({"context": None, "qas": []}, "the context is not text"),
        ({"context": "a cat"}, "has no list qas"),
        (PARAGRAPH | {"qas": [QUESTION | {"id": "5", "answers": None}]}, "has no list answers"),
        (PARAGRAPH | {"qas": [QUESTION | {"id": "5", "answers": [{"text": "cat"}]}]}, "an integer answer_start"),
    ],
}
HELD = {"val_fraction": 0.1, "test_fraction": 0.1}


def read(kind: str, root: Path, rows: list[Any], suffix: str) -> Source:
    """Writes the rows in the format of a source, and opens it."""
    content: Any = rows
    if kind == "coco":
        content = {"images": [{"id": n, "file_name": f"{n}.png"} for n in range(ROWS)], "annotations": rows}
    elif kind == "karpathy":
        content = {"images": rows}
    elif kind == "squad":
        content = {"data": [{"paragraphs": rows}]}
    lines = suffix == ".jsonl" and content is rows
    path = root / f"rows{'.jsonl' if lines else '.json'}"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(content))
    if kind == "easy_vqa":
        for split, part in (("train", rows), ("test", [VALID[kind](0)])):
            (root / split).mkdir(exist_ok=True)
            (root / split / "questions.json").write_text(json.dumps(part))
            if not (root / split / "images").exists():
                (root / split / "images").symlink_to(root, target_is_directory=True)
        return EasyVQA(root=str(root))
    classes: dict[str, Any] = {"captions": Captions, "questions": QuestionTable, "conversations": Conversations}
    classes |= {"image_table": ImageTable, "texts": TextTable, "translations": TranslationTable, "squad": Squad}
    if kind in classes:
        return classes[kind](path=str(path), **HELD)
    return Coco(root=str(root), path=str(path), **HELD)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rows")
    for n in range(ROWS):
        picture(root / f"{n}.png")
    return root


CASES = [(kind, row, reason) for kind, rows in INVALID.items() for row, reason in rows]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize(("kind", "row", "reason"), CASES)
def test_an_invalid_row_is_skipped_and_named(kind: str, row: Any, reason: str, suffix: str, root: Path) -> None:
    if suffix == ".jsonl" and kind in ("coco", "karpathy", "easy_vqa", "squad"):
        pytest.skip("has one file format")
    rows = [VALID[kind](n) for n in range(ROWS)]
    rows[5] = row
    source = read(kind, root, rows, suffix)
    lines = [line for line in source.skipped if line.kind == "invalid row"]
    assert len(lines) == 1 and reason in lines[0], source.skipped
    assert any(place in lines[0] for place in ("object 6", "line 6", "5", "entry 6"))
    names = [record.id for split in source.splits for record in source.split(split).records()]
    assert len(names) == ROWS - 1 + (kind == "easy_vqa")
    if isinstance(row, dict) and row.get("image") == "5.png" and "no column" not in reason:
        assert not any("/5.png" in path for path in source.find_uncaptioned_images())  # the row names it
    rows[7] = rows[9] = row  # 1.5% of the rows
    message = refusal(read, kind, root, rows, suffix)
    assert f"3 of {source.rows - (kind == 'easy_vqa'):,} rows are invalid" in message and reason in message
    with collect_errors() as errors:
        source = read(kind, root, rows, suffix)
    assert len([line for line in source.skipped if line.kind == "invalid row"]) == 3 and len(errors) == 1


def test_an_invalid_line_of_json_or_csv_is_skipped_and_named(root: Path) -> None:
    lines = [json.dumps(VALID["captions"](n)) for n in range(ROWS)]
    (root / "lines.jsonl").write_text("\n".join([*lines[:50], '{"image": "50.png", "capt', *lines[51:]]))
    (line,) = Captions(path=str(root / "lines.jsonl"), **HELD).skipped
    assert "line 51: not JSON" in line
    cells = [f"{n}.png,caption {n}" for n in range(ROWS)]
    (root / "lines.csv").write_text("\n".join(["image,caption", *cells[:50], "50.png,a cat, a dog", *cells[51:]]))
    (line,) = Captions(path=str(root / "lines.csv"), **HELD).skipped
    assert "line 52: 3 fields for 2 columns" in line


def test_an_error_names_ten_reasons_for_invalid_rows_each_once(root: Path) -> None:
    rows = [VALID["conversations"](n) for n in range(ROWS)]
    for n in range(0, ROWS, 10):
        rows[n] = {"image": f"{n}.png", "conversations": [ASSISTANT]}
    first, second = refusal(read, "conversations", root, rows, ".json").split("\n")
    assert "20 of 200 rows are invalid" in first and "correct or remove them" in first
    assert second == "object 1: an answer has no question before it (also object 11, object 21 and 17 more)"
    for n in range(0, ROWS, 10):
        rows[n] = {"image": f"{n}.png", "conversations": [{"from": f"role {n}", "value": "x"}]}
    _, second = refusal(read, "conversations", root, rows, ".json").split("\n")
    assert second.count("a turn has the role") == 10 and second.endswith("; and 10 more reasons")

"""What holds of every source that reads files: rows, splits, images that are missing, and damaged files.

One invalid row does not refuse a file: it is skipped, counted and named, up to 1% of the rows.
"""

import inspect
import json
import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import pytest
from caption_data import NO_HOLD_OUT, picture, refusal
from easy_vqa_data import draw_easy_vqa, easy_questions

from vlm.config.build import check
from vlm.data import shapes, sources
from vlm.data.records import Source, collect_errors
from vlm.data.sources.aligned_files import AlignedFiles
from vlm.data.sources.captions import Captions, Coco, Flickr8k
from vlm.data.sources.class_folders import ImageTable
from vlm.data.sources.conll import Conll
from vlm.data.sources.preferences import PreferenceTable
from vlm.data.sources.questions import Conversations, EasyVQA, QuestionTable
from vlm.data.sources.squad import Squad
from vlm.data.sources.text_tables import SST2, TextTable, TranslationTable
from vlm.errors import UserError

ROWS = 200
USER, ASSISTANT = {"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "A cat."}
SAYS = {"from": "human", "value": "what?"}
PARAGRAPH = {"context": "a cat", "qas": [{"id": "x", "question": "what?", "answers": []}]}
QUESTION = {"question": "what?", "answers": [{"text": "cat", "answer_start": 2}]}


class Kind(NamedTuple):
    """A source: its class, a valid row, invalid ones with the reason, and the content of its file if that is no table.

    Args:
        columns: Columns of a table that must exist.
        limit: Option that limits the texts per image.
    """

    source: Callable[..., Source]
    row: Callable[[int], Any]
    invalid: list[tuple[Any, str]]
    content: Callable[[list[Any]], Any] | None = None
    columns: tuple[str, ...] = ()
    limit: str = ""


def coco(rows: list[Any]) -> dict[str, Any]:
    ids = {row["image_id"] for row in rows if isinstance(row, dict) and "image_id" in row}
    return {"images": [{"id": n, "file_name": f"{n}.png"} for n in {*range(ROWS), *ids}], "annotations": rows}


def talk(*turns: Any, image: Any = "5.png") -> dict[str, Any]:
    return {"image": image, "conversations": list(turns)}


def prefer(**changes: Any) -> dict[str, Any]:
    """A pair of answers in messages, with changed cells."""
    turn = [{"role": "assistant", "content": "A dog."}]
    return {"image": "5.png", "prompt": "what?", "chosen": "A cat.", "rejected": turn} | changes


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


KINDS = {
    "captions": Kind(
        Captions,
        lambda n: {"image": f"{n}.png", "caption": f"caption {n}"},
        [
            ({"image": "5.png", "caption": None}, "must be text"),
            ({"image": "5.png", "caption": ["x", 3]}, "must be text"),
            ({"image": "5.png"}, "no column 'caption'"),
            ({"image": "5.png", "caption": "x", "split": "odd"}, "unknown split 'odd'"),
            ("5.png", "not a JSON object"),
        ],
        columns=("image", "caption"),
        limit="captions_per_image",
    ),
    "questions": Kind(
        QuestionTable,
        lambda n: {"image": f"{n}.png", "question": "what?", "answer": f"thing {n}"},
        [
            ({"image": "5.png", "question": "what?", "answer": None}, "image, question and answer must be text"),
            ({"image": "5.png", "question": "what?"}, "no column 'answer'"),
        ],
        columns=("image", "question", "answer"),
        limit="questions_per_image",
    ),
    "conversations": Kind(
        Conversations,
        lambda n: talk(USER, ASSISTANT | {"value": f"Cat {n}."}, image=f"{n}.png"),
        [
            (talk(ASSISTANT, USER), "an answer has no question before it"),
            (talk(USER, ASSISTANT, ASSISTANT), "an answer has no question before it"),
            (talk(USER, ASSISTANT | {"value": None}), "the content of a turn is not text"),
            (
                talk(USER, ASSISTANT | {"value": [{"type": "video"}]}),
                "a part of type 'video'; supported types are text",
            ),
            (talk(USER, ASSISTANT | {"from": "bot"}), "a turn has the role 'bot'; supported roles are human, user"),
            (talk(USER, ASSISTANT | {"from": ["bot"]}), "a turn has the role"),
            (talk(USER, {"value": "x"}), "a turn has neither from and value, nor role and content, nor user"),
            (talk(USER | {"value": "<image><image> what?"}, ASSISTANT), "its turns have 2 <image> for 1 images"),
            (talk(USER, ASSISTANT, image=["5.png", "6.png"]), "its turns have 1 <image> for 2 images"),
            (talk() | {"conversations": None}, "the conversation is not a list of turns"),
            (talk(USER, ASSISTANT, image=5), "images and kinds must be text"),
            ({"image": "5.png"}, "no column 'conversations|messages|texts'"),
        ],
        columns=("conversation",),
        limit="conversations_per_image",
    ),
    "preferences": Kind(
        PreferenceTable,
        lambda n: prefer(image=f"{n}.png", chosen=f"Cat {n}."),
        [
            (prefer(chosen=" A dog. "), "chosen equals rejected"),
            (prefer(rejected=" "), "rejected is an empty answer"),
            (prefer(chosen=None), "chosen is not a list of turns"),
            (prefer(chosen=messages("what?")), "chosen does not end with a turn of the assistant"),
            (prefer(rejected=[]), "rejected does not end with a turn of the assistant"),
            (
                prefer(prompt="", chosen=messages("a?", "b"), rejected=messages("b?", "c")),
                "the prompts of chosen and rejected differ",
            ),
            (
                prefer(prompt="who?", chosen=messages("a?", "b"), rejected=messages("a?", "c")),
                "chosen and rejected have other turns before the answer than the prompt has",
            ),
            (prefer(prompt=messages("what?", "a cat")), "the prompt does not end with a turn of the user"),
            (prefer(prompt="<image><image> what?"), "its turns have 2 <image> for 1 images"),
            (prefer(prompt=[{"role": "bot", "content": "x"}]), "a turn has the role 'bot'; supported roles are"),
            (prefer(image=5), "images and kinds must be text"),
            ({"image": "5.png", "prompt": "what?", "chosen": "A cat."}, "no column 'rejected'"),
        ],
        columns=("chosen", "rejected"),
        limit="pairs_per_image",
    ),
    "image_table": Kind(
        ImageTable,
        lambda n: {"image": f"{n}.png", "label": "ab"[n % 2]},
        [({"image": "5.png", "label": 1.5}, "label 1.5 is not text"), (None, "not a JSON object")],
        columns=("image", "label"),
    ),
    "texts": Kind(
        TextTable,
        lambda n: {"text": f"text {n}", "label": "ab"[n % 2]},
        [({"text": 3.5, "label": "a"}, "text 3.5 is not text"), ({"text": "x"}, "no column 'label'")],
        columns=("text", "label"),
    ),
    "translations": Kind(
        TranslationTable,
        lambda n: {"text": f"text {n}", "translation": f"Satz {n}"},
        [({"text": "x", "translation": ["y"]}, "translation ['y'] is not text")],
        columns=("text", "translation"),
    ),
    "coco": Kind(
        Coco,
        lambda n: {"image_id": n, "id": n, "caption": f"caption {n}"},
        [
            ({"image_id": 5, "id": 5, "caption": None}, "'caption' is None"),
            ({"image_id": 5, "id": 5, "bbox": []}, "has no 'caption'"),
            ({"id": 5, "caption": "x"}, "has no 'image_id'"),
            (None, "not a JSON object"),
        ],
        coco,
        limit="captions_per_image",
    ),
    "karpathy": Kind(
        Coco,
        lambda n: {"filename": f"{n}.png", "split": "train", "sentences": [{"raw": f"caption {n}"}]},
        [
            ({"filename": "5.png", "split": "odd", "sentences": []}, "unknown split 'odd'"),
            ({"filename": "5.png", "split": "val", "sentences": [{}]}, "has no 'raw'"),
            ({"split": "val", "sentences": []}, "has no 'filename'"),
        ],
        lambda rows: {"images": rows},
    ),
    "easy_vqa": Kind(
        EasyVQA,
        lambda n: ["is it red?", "yes", n],
        [(["is it red?", None, 5], "is not [question, answer"), ({}, "is not [question, answer, image number]")],
        lambda rows: rows,
    ),
    "squad": Kind(
        Squad,
        lambda n: PARAGRAPH | {"context": f"a cat {n}", "qas": [QUESTION | {"id": str(n)}]},
        [
            (None, "is not an object"),
            ({"context": None, "qas": []}, "the context is not text"),
            ({"context": "a cat"}, "has no list qas"),
            (PARAGRAPH | {"qas": [QUESTION | {"id": "5", "answers": None}]}, "has no list answers"),
            (PARAGRAPH | {"qas": [QUESTION | {"id": "5", "answers": [{"text": "cat"}]}]}, "an integer answer_start"),
        ],
        lambda rows: {"data": [{"paragraphs": rows}]},
    ),
}
TABLES = [kind for kind, about in KINDS.items() if about.columns]
WITH_IMAGES = [kind for kind, about in KINDS.items() if "image" in about.source.holds]
HELD = {"val_fraction": 0.1, "test_fraction": 0.1}


def write(kind: str, root: Path, rows: list[Any], suffix: str = ".json", name: str = "rows") -> str:
    """Writes the rows in the format of a source; returns the path."""
    path, content = root / f"{name}{suffix}", KINDS[kind].content
    lines = suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(content(rows) if content else rows))
    return str(path)


def read(kind: str, root: Path, rows: list[Any], suffix: str = ".json", **options: Any) -> Source:
    """Writes the rows, and opens the source."""
    if kind == "easy_vqa":
        for split, part in (("train", rows), ("test", [KINDS[kind].row(0)])):
            (root / split).mkdir(exist_ok=True)
            (root / split / "questions.json").write_text(json.dumps(part))
            if not (root / split / "images").exists():
                (root / split / "images").symlink_to(root, target_is_directory=True)
        return EasyVQA(root=str(root))
    return KINDS[kind].source(**{"path": write(kind, root, rows, suffix), "root": str(root), **HELD, **options})


def valid(kind: str) -> list[Any]:
    return [KINDS[kind].row(n) for n in range(ROWS)]


def ids(source: Source) -> list[str]:
    return [record.id for split in source.splits for record in source.split(split).records()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rows")
    for n in range(ROWS):
        picture(root / f"{n}.png")
    return root


CASES = [
    pytest.param(kind, row, reason, suffix)
    for kind, about in KINDS.items()
    for row, reason in about.invalid
    for suffix in ((".json", ".jsonl") if about.columns else (".json",))
]


@pytest.mark.sample(plain=31, slow=31)
@pytest.mark.parametrize(("kind", "row", "reason", "suffix"), CASES)
def test_an_invalid_row_is_skipped_and_named(kind: str, row: Any, reason: str, suffix: str, root: Path) -> None:
    rows = valid(kind)
    rows[5] = row
    source = read(kind, root, rows, suffix)
    lines = [line for line in source.skipped if line.kind == "invalid row"]
    assert len(lines) == 1 and reason in lines[0], source.skipped
    assert any(place in lines[0] for place in ("object 6", "line 6", "5", "entry 6"))
    assert len(ids(source)) == ROWS - 1 + (kind == "easy_vqa")
    if isinstance(row, dict) and row.get("image") == "5.png" and "no column" not in reason:
        assert not any("/5.png" in path for path in source.find_uncaptioned_images())  # the row names it
    rows[7] = rows[9] = row  # 1.5% of the rows
    message = refusal(read, kind, root, rows, suffix)
    assert f"3 of {source.rows - (kind == 'easy_vqa'):,} rows are invalid" in message and reason in message
    with collect_errors() as errors:
        source = read(kind, root, rows, suffix)
    assert len([line for line in source.skipped if line.kind == "invalid row"]) == 3 and len(errors) == 1


def test_an_invalid_line_of_json_or_csv_is_skipped_and_named(root: Path) -> None:
    lines = [json.dumps(row) for row in valid("captions")]
    (root / "lines.jsonl").write_text("\n".join([*lines[:50], '{"image": "50.png", "capt', *lines[51:]]))
    (line,) = Captions(path=str(root / "lines.jsonl"), **HELD).skipped
    assert "line 51: not JSON" in line
    cells = [f"{n}.png,caption {n}" for n in range(ROWS)]
    (root / "lines.csv").write_text("\n".join(["image,caption", *cells[:50], "50.png,a cat, a dog", *cells[51:]]))
    (line,) = Captions(path=str(root / "lines.csv"), **HELD).skipped
    assert "line 52: 3 fields for 2 columns" in line


def test_an_error_names_ten_reasons_for_invalid_rows_each_once(root: Path) -> None:
    rows = valid("conversations")
    for n in range(0, ROWS, 10):
        rows[n] = talk(ASSISTANT)
    first, second = refusal(read, "conversations", root, rows).split("\n")
    assert "20 of 200 rows are invalid" in first and "correct or remove them" in first
    assert second == "object 1: an answer has no question before it (also object 11, object 21 and 17 more)"
    for n in range(0, ROWS, 10):
        rows[n] = talk({"from": f"role {n}", "value": "x"})
    _, second = refusal(read, "conversations", root, rows).split("\n")
    assert second.count("a turn has the role") == 10 and second.endswith("; and 10 more reasons")


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_missing_image_is_skipped_and_named_and_many_are_refused(kind: str, root: Path) -> None:
    rows = valid(kind)
    rows[5] = KINDS[kind].row(1005)
    source = read(kind, root, rows)
    (line,) = (line for line in source.skipped if getattr(line, "kind", "") == "missing image")
    assert "1005.png: listed in " in line and len(ids(source)) == ROWS - 1 + (kind == "easy_vqa")
    for n in range(6, 10):
        rows[n] = KINDS[kind].row(1000 + n)
    message = refusal(read, kind, root, rows)
    assert re.search(r"\d of \d+ images are missing, such as .*100\d\.png.*; set data\.root \(now ", message)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "easy_vqa"])
def test_splits_are_those_of_files_of_rows_or_drawn(kind: str, root: Path) -> None:
    rows = valid(kind)
    paths = [write(kind, root, rows[start:stop], name=f"{start}") for start, stop in ((0, 100), (100, 150), (150, 200))]
    files = dict(zip(("path", "val_path", "test_path"), paths, strict=True))
    by_file = KINDS[kind].source(root=str(root), **files)
    assert {name: len(by_file.split(name)) for name in by_file.splits} == {"train": 100, "val": 50, "test": 50}
    if kind in TABLES or kind == "karpathy":
        splits = [("Training", "dev", " testing")[n % 3] for n in range(ROWS)]
        stated = [row | {"split": split} for row, split in zip(rows, splits, strict=True)]
        source = read(kind, root, stated, val_fraction=0.5)  # fractions do not touch splits that rows have
        assert {name: len(source.split(name)) for name in source.splits} == {"train": 67, "val": 67, "test": 66}
    if kind in TABLES:
        message = refusal(read, kind, root, stated, val_path=paths[1])
        assert "rows.json, object 2: a row of split val in the training file" in message
        partly = [*stated[:100], *rows[100:]]
        message = refusal(read, kind, root, partly)
        assert "has no split, but other images have one" in message or "only some rows have a split" in message
        with collect_errors() as errors:
            assert errors == [] and len(ids(read(kind, root, partly))) == ROWS
        assert errors == [message]
    if kind == "karpathy":
        return
    drawn = [read(kind, root, rows, seed=seed, val_fraction=0.2, test_fraction=0.2) for seed in (0, 0, 1)]
    parts = [
        {name: {record.id for record in source.split(name).records()} for name in source.splits} for source in drawn
    ]
    assert parts[0] == parts[1] != parts[2] and sum(map(len, parts[0].values())) == ROWS
    assert [*parts[0]] == ["train", "val", "test"] and all(20 < len(parts[0][name]) < 65 for name in ("val", "test"))
    for val, test in ((0.5, 0.5), (-0.1, 0.1), (1, 0), (float("nan"), 0)):
        if kind != "squad":
            assert "data.source.val_fraction" in refusal(read, kind, root, rows, val_fraction=val, test_fraction=test)


@pytest.mark.parametrize("kind", [kind for kind, about in KINDS.items() if about.limit])
def test_an_epoch_of_training_draws_so_many_texts_of_an_image(kind: str, root: Path) -> None:
    about = KINDS[kind]
    (key,) = {"questions", "pairs", "captions"} & {*about.source.holds}
    rows = valid(kind)[:9]
    for row in rows:
        row.update({"image_id": 0} if kind == "coco" else {"image": "0.png"})
    split = read(kind, root, rows, **NO_HOLD_OUT, **{about.limit: 2}).split("train")
    drawn = [tuple(split.record(0, epoch)[key]) for epoch in range(9)]
    assert {len(set(texts)) for texts in drawn} == {2} and len(set(drawn)) > 3
    assert drawn == [tuple(split.record(0, epoch)[key]) for epoch in range(9)]


@pytest.mark.parametrize(("kind", "column"), [(kind, column) for kind in TABLES for column in KINDS[kind].columns])
def test_a_column_that_is_absent_is_named(kind: str, column: str, root: Path) -> None:
    message = refusal(read, kind, root, valid(kind), **{f"{column}_column": "other"})
    assert re.search(rf"rows\.json: no column 'other' among .*; set data\.source\.{column}_column to the", message)


EMPTY = {
    "captions": {"image": "names no image", "caption": "no caption"},
    "questions": {"image": "names no image", "question": "no question and answer", "answer": "no question and answer"},
    "conversations": {"image": "names no image"},
    "preferences": {"image": "names no image"},
    "image_table": {"image": "no image", "label": "no label"},
    "texts": {"text": "no text", "label": "no label"},
    "translations": {"text": "no text", "translation": "no translation"},
}


@pytest.mark.parametrize(("kind", "column"), [(kind, column) for kind in EMPTY for column in EMPTY[kind]])
def test_a_row_with_an_empty_cell_is_skipped_and_named(kind: str, column: str, root: Path) -> None:
    rows = valid(kind)
    rows[5] |= {column: " "}
    source = read(kind, root, rows)
    assert source.skipped == [f"{root / 'rows.json'}, object 6: {EMPTY[kind][column]}"] and len(ids(source)) == ROWS - 1


# Files of a few rows: the name of the file that is damaged, its content, and how the source is opened.

TRIPLES = [
    ("a.png", "a red dog, running", "train"),
    ("b.png", 'says "no"', "val"),
    ("c.png", "ein Hund für 狗", "test"),
]
TRIPLES *= 4
CELLS = [(name, text.replace('"', '""'), split) for name, text, split in TRIPLES]
CSV = "image,caption,split\n" + "".join(f'{name},"{text}",{split}\n' for name, text, split in CELLS)
COCO = {"images": [{"id": n, "file_name": row[0]} for n, row in enumerate(TRIPLES)]}
COCO |= {"annotations": [{"id": n, "image_id": n, "caption": row[1]} for n, row in enumerate(TRIPLES)]}
ASKED = {"role": "user", "content": "what?"}


def json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


LINES = json_lines([{"image": name, "caption": [text], "split": split} for name, text, split in TRIPLES])
CHATS = json_lines(
    [{"images": [row[0]], "messages": [ASKED, {"role": "assistant", "content": row[1]}]} for row in TRIPLES]
)
PASSAGES = json.dumps({"data": [{"paragraphs": [KINDS["squad"].row(n) for n in range(12)]}]})
LISTS = {
    f"Flickr_8k.{name}Images.txt": f"{image}.png\n" for name, image in (("train", "a"), ("dev", "b"), ("test", "c"))
}
OTHERS = {"train.de": "eins\nzwei\ndrei\n", "stsa.binary.dev": "1 good\n", "stsa.binary.test": "0 bad\n", **LISTS}
READERS: dict[str, tuple[str, Callable[[str, str], Source]]] = {
    "captions.csv": (CSV, lambda root, path: Captions(root=root, path=path)),
    "captions.jsonl": (LINES, lambda root, path: Captions(root=root, path=path)),
    "coco.json": (json.dumps(COCO), lambda root, path: Coco(root=root, path=path)),
    "train/questions.json": (easy_questions(2), lambda root, path: EasyVQA(root=root)),
    "questions.csv": (
        CSV.replace("caption", "question").replace("split\n", "answer\n"),
        lambda root, path: QuestionTable(root=root, path=path),
    ),
    "chats.jsonl": (CHATS, lambda root, path: Conversations(root=root, path=path)),
    "classes.csv": (
        CSV.replace("caption,split", "other,label"),
        lambda root, path: ImageTable(path=path, **NO_HOLD_OUT),
    ),
    "texts.csv": (CSV.replace("image,caption,split", "label,text,other"), lambda root, path: TextTable(path=path)),
    "pairs.csv": (
        CSV.replace("image,caption,split", "text,translation,other"),
        lambda root, path: TranslationTable(path=path),
    ),
    "passages.json": (PASSAGES, lambda root, path: Squad(path=path)),
    "tags.conll": ("a\tO\nb\tB\n\n" * 6, lambda root, path: Conll(path=path)),
    "train.en": (
        "one\ntwo\nthree\n",
        lambda root, path: AlignedFiles(root=root, source="en", target="de", val=None, test=None),
    ),
    "stsa.binary.train": ("1 a fine film\n0 a bore\n1 so good\n", lambda root, path: SST2(root=root)),
    "Flickr8k.token.txt": (
        "".join(f"{name}#{n}\t{text}\n" for n, (name, text, _) in enumerate(TRIPLES)),
        lambda root, path: Flickr8k(root=root),
    ),
}
PIECES = [b"\0", b'"', b",", b";", b"\t", b"\r", b"\n\n", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"]", b"\x1b[31m"]
PIECES += [b"null", b"NaN", b"true", b"split", b"1e999", b"../../etc", b'"' * 99, b"[" * 5000, b"9" * 5000]
PIECES += ["\u202e\U0001f468\u200d".encode()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for image in ("a.png", "b.png", "c.png"):
        picture(tmp_path / image)
        picture(tmp_path / "images" / image)
    for name, text in OTHERS.items():
        (tmp_path / name).write_text(text)
    return draw_easy_vqa(tmp_path, images=2)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_absent_empty_or_not_utf8_is_named(name: str, folder: Path) -> None:
    (text, opener), file = READERS[name], folder / name
    reader = partial(opener, str(folder), str(file))
    file.unlink(missing_ok=True)
    assert str(file) in refusal(reader)
    file.write_text("")
    assert file.name in refusal(reader)
    file.write_text(text)
    known = ids(reader())
    file.write_text("\ufeff" + text)
    assert ids(reader()) == known and known
    file.write_bytes(text.encode() + b"\xff\n")
    line = text.count("\n") + 1
    assert refusal(reader) == f"{file}, line {line}: is not UTF-8; save the file in UTF-8"
    with collect_errors() as errors, nullcontext() if file.suffix != ".json" else suppress(UserError):
        reader()
    assert f"{file}, line {line}: is not UTF-8; save the file in UTF-8" in errors


def mutate(content: bytes, draw: random.Random) -> bytes:
    """A content with one to four of its bytes, lines or ends changed."""
    for _ in range(draw.randint(1, 4)):
        at, to = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        lines = content.split(b"\n")
        draw.shuffle(lines)
        changes = [content[:at] + draw.choice(PIECES) + content[at:], content[:at] + content[to:], content[:at]]
        changes += [content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :], content + content[at:to]]
        changes += [b"\n".join(lines), content.decode("utf-8", "replace").encode("utf-16")]
        content = draw.choice(changes)
    return content


@pytest.mark.sample(plain=5, slow=9)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_two_lines_and_soon(name: str, folder: Path) -> None:
    """Never another exception, nor a long wait."""
    text, opener = READERS[name]
    draw, file = random.Random(name), folder / name
    refused = 0
    for number in range(100):
        file.write_bytes(mutate(text.encode(), draw))
        begun = time.process_time()
        try:
            with collect_errors() if number % 2 else nullcontext():
                source = opener(str(folder), str(file))
            assert all(id is not None for id in ids(source))
        except UserError as fault:
            refused += 1
            said = str(fault)
            assert said.count("\n") < 2 and said.replace("\n", "").isprintable() and len(said) < 2000, said
        assert time.process_time() - begun < 5
    assert 0 < refused < 100


MODULES = [
    import_module(f"{package.__name__}.{name}")
    for package in (sources, shapes)
    for _, name, _ in iter_modules(package.__path__)
]
CLASSES = {
    kind
    for module in MODULES
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, Source) and kind.__module__ == module.__name__
}
COUNT = re.compile(r".*_per_(image|kind)|(train|val|test)_(scenes|pairs|captions|stories|documents|lines)|scenes")
COUNTS = {kind: [name for name in inspect.signature(kind).parameters if COUNT.fullmatch(name)] for kind in CLASSES}


@pytest.mark.parametrize("kind", sorted((kind for kind in CLASSES if COUNTS[kind] and kind.name), key=str))
def test_a_number_of_samples_is_at_least_one(kind: type[Source]) -> None:
    """By its annotation, which the check of a config reads."""
    counts = dict.fromkeys(COUNTS[kind], 0)
    with pytest.raises(UserError) as refused:
        check({"data": {"source": {"_target_": f"{kind.__module__}.{kind.__qualname__}", **counts}}})
    for name in counts:
        (line,) = (line for line in str(refused.value).splitlines() if line.startswith(f"data.source.{name}: "))
        assert line.startswith(f"data.source.{name}: 0 is out of range, expected int") and "at least 1" in line

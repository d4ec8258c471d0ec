"""Damaged tables are read, or refused in one or two lines: never another exception, nor a long wait."""

import json
import random
import time
from contextlib import nullcontext

import pytest
from captioned import picture
from easy import draw_easy_vqa, easy_questions

from vlm.data.records import collect_errors
from vlm.data.sources.captions import Captions, Coco
from vlm.data.sources.questions import Conversations, EasyVQA, QuestionTable
from vlm.data.sources.text_tables import TextTable, TranslationTable
from vlm.errors import UserError

ROWS = [
    ("a.png", "a red dog, running", "train"),
    ("b.png", 'says "no"', "val"),
    ("c.png", "ein Hund für 狗", "test"),
] * 4


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


CELLS = [(name, text.replace('"', '""'), split) for name, text, split in ROWS]
CSV = "image,caption,split\n" + "".join(f'{name},"{text}",{split}\n' for name, text, split in CELLS)
LINES = lines({"image": name, "caption": [text], "split": split} for name, text, split in ROWS)
COCO = {"images": [{"id": n, "file_name": row[0]} for n, row in enumerate(ROWS)]}
COCO |= {"annotations": [{"id": n, "image_id": n, "caption": row[1]} for n, row in enumerate(ROWS)]}
QUESTIONS = CSV.replace("caption", "question").replace("split\n", "answer\n")
ASKED = {"role": "user", "content": "what?"}
CHATS = lines({"images": [row[0]], "messages": [ASKED, {"role": "assistant", "content": row[1]}]} for row in ROWS)
TEXTS = CSV.replace("image,caption,split", "label,text,other")
PAIRS = CSV.replace("image,caption,split", "text,translation,other")
READERS = {
    "captions.csv": (CSV, lambda root, path: Captions(root=root, path=path)),
    "captions.jsonl": (LINES, lambda root, path: Captions(root=root, path=path)),
    "coco.json": (json.dumps(COCO), lambda root, path: Coco(root=root, path=path)),
    "train/questions.json": (easy_questions(2), lambda root, path: EasyVQA(root=root)),
    "questions.csv": (QUESTIONS, lambda root, path: QuestionTable(root=root, path=path)),
    "chats.jsonl": (CHATS, lambda root, path: Conversations(root=root, path=path)),
    "texts.csv": (TEXTS, lambda root, path: TextTable(path=path)),
    "pairs.csv": (PAIRS, lambda root, path: TranslationTable(path=path)),
}
PIECES = [b"\0", b'"', b",", b";", b"\t", b"\r", b"\n\n", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"]", b"\x1b[31m"]
PIECES += [b"null", b"NaN", b"true", b"split", b"1e999", b"../../etc", b'"' * 99, b"[" * 5000, b"9" * 5000]
PIECES += ["\u202e\U0001f468\u200d".encode()]


def mutated(content: bytes, draw: random.Random) -> bytes:
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


@pytest.mark.parametrize("name", READERS)
def test_damaged_tables(name: str, tmp_path, capsys) -> None:
    text, read = READERS[name]
    for image in ("a.png", "b.png", "c.png"):
        picture(tmp_path / image)
    draw_easy_vqa(tmp_path, images=2)
    draw, file = random.Random(name), tmp_path / name
    refused = 0
    for number in range(200):
        file.write_bytes(mutated(text.encode(), draw))
        begun = time.process_time()
        try:
            with collect_errors() if number % 2 else nullcontext():
                source = read(str(tmp_path), str(file))
            for split in source.splits:
                assert all(record.id is not None for record in source.split(split).records())
        except UserError as fault:
            refused += 1
            said = str(fault)
            assert said.count("\n") < 2 and said.replace("\n", "").isprintable() and len(said) < 2000, said
        assert time.process_time() - begun < 5
    assert 0 < refused < 200

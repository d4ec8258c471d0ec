import csv
import io
import json

import pytest

from vlm.errors import UserError
from vlm.inference.files import Writer, find_images, printable


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.jpg", "a.PNG", "notes.txt", "deep/er/c.jpeg", "od[d].jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "inputs, expected",
    [
        (["b.jpg", "a.PNG"], ["b.jpg", "a.PNG"]),
        (["."], ["a.PNG", "b.jpg", "deep/er/c.jpeg", "od[d].jpg"]),
        (["*.jpg"], ["b.jpg", "od[d].jpg"]),
        (["**/*.jpeg"], ["deep/er/c.jpeg"]),
        (["od[d].jpg"], ["od[d].jpg"]),  # a file whose name looks like a pattern
        (["b.jpg", ".", "b.jpg"], ["b.jpg", "a.PNG", "deep/er/c.jpeg", "od[d].jpg"]),
        (["gone.jpg", "notes.txt"], ["gone.jpg", "notes.txt"]),  # named by hand: reading them tells
    ],
)
def test_inputs_name_images(folder, inputs, expected):
    assert find_images(inputs) == expected


@pytest.mark.parametrize("given", ["*.gif", "deep/empty"])
def test_inputs_that_name_no_image_are_refused(folder, given):
    (folder / "deep" / "empty").mkdir()
    with pytest.raises(UserError, match="no images found"):
        find_images(["b.jpg", given])


RECORDS = [
    {"image": "a b,c.jpg", "caption": 'a "red"\tsquare\n', "logprob": -1.5},
    {"image": "ü.jpg", "caption": "\x1b[31mrot und grün", "logprob": -2.0},
]


def written(tmp_path, form):
    writer = Writer(form=form, fields=("image", "caption"), out=str(tmp_path / "out"))
    for record in RECORDS:
        writer.write(record)
    writer.close()
    return (tmp_path / "out").read_text(encoding="utf-8")


def test_text_is_a_line_a_record_that_no_caption_can_break(tmp_path):
    assert written(tmp_path, "text") == 'a b,c.jpg\ta "red"\\tsquare\\n\nü.jpg\t\\x1b[31mrot und grün\n'


def test_jsonl_and_csv_give_every_field_back(tmp_path):
    assert [json.loads(line) for line in written(tmp_path, "jsonl").splitlines()] == RECORDS
    rows = list(csv.DictReader(io.StringIO(written(tmp_path, "csv"), newline="")))
    assert [row | {"logprob": float(row["logprob"])} for row in rows] == RECORDS


def test_records_are_written_as_they_come(tmp_path, capsys):
    writer = Writer(form="text", fields=("image",))
    writer.write(RECORDS[0])
    assert capsys.readouterr().out == "a b,c.jpg\n"


def test_writers_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(UserError, match="--format: 'xml' is unknown"):
        Writer(form="xml", fields=())
    with pytest.raises(UserError, match=r"--out .*cannot be written \(Is a directory\)"):
        Writer(form="text", fields=(), out=str(tmp_path))


def test_printable_keeps_letters_of_any_script():
    assert printable("ein Rotkehlchen 知更鳥\u2028\u202e\r") == "ein Rotkehlchen 知更鳥\\u2028\\u202e\\r"

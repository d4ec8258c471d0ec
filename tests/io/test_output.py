"""Records in three forms, and a file of --out that destroys nothing."""

import csv
import io
import json
import os

import pytest

from vlm.errors import UserError, printable
from vlm.io.output import Output, Records, align_columns, csv_text, find_completed

UNDECODED = os.fsdecode(b"\xff\n.png")
RECORDS = [
    {"image": "a b,c.jpg", "caption": 'a "red"\tsquare\n', "logprob": -1.5},
    {"image": "ü.jpg", "caption": "\x1b[31mrot und grün", "logprob": -2.0},
]


def write_records(place, form, records=RECORDS):
    with Output(str(place)) as output:
        writer = Records(form=form, fields=("image", "caption"), output=output)
        for record in records:
            writer.write(record)
    return place.read_text(encoding="utf-8")


def test_text_is_a_line_a_record_that_no_caption_can_break(tmp_path):
    text = write_records(tmp_path / "out", "text")
    assert text == 'a b,c.jpg\ta "red"\\tsquare\\n\nü.jpg\t\\x1b[31mrot und grün\n'


def test_jsonl_and_csv_give_every_field_back(tmp_path):
    assert [json.loads(line) for line in write_records(tmp_path / "out", "jsonl").splitlines()] == RECORDS
    rows = list(csv.DictReader(io.StringIO(write_records(tmp_path / "out", "csv"), newline="")))
    assert [row | {"logprob": float(row["logprob"])} for row in rows] == RECORDS


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_a_link_stays_one_and_a_name_that_is_no_utf8_is_escaped(tmp_path, form):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    record = {"image": UNDECODED, "caption": "a"}
    text = write_records(tmp_path / "link", form, [record])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == text
    assert "\\udcff" in text and (form != "jsonl" or json.loads(text) == record)


def test_a_form_that_is_none_is_refused():
    with pytest.raises(UserError, match="--format: 'xml' is unknown"):
        Records(form="xml", fields=(), output=Output(None))


def test_printable_keeps_letters_of_any_script():
    assert printable("ein Rotkehlchen 知更鳥\u2028\u202e\r") == "ein Rotkehlchen 知更鳥\\u2028\\u202e\\r"


def test_the_file_is_as_it_was_until_all_is_written(tmp_path):
    path = tmp_path / "out"
    path.write_text("yesterday")
    with Output(str(path)):
        pass  # nothing was ready to be written
    assert path.read_text() == "yesterday"
    with Output(str(path)) as output:
        output.write("to")
        assert path.read_text() == "yesterday"
        output.write("day")
    assert path.read_text() == "today" and os.listdir(tmp_path) == ["out"]


def test_what_a_command_leaves_unfinished_lies_beside(tmp_path, capsys):
    path = tmp_path / "out"
    path.write_text("yesterday")
    with pytest.raises(KeyboardInterrupt), Output(str(path)) as output:
        output.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "yesterday" and (tmp_path / "out.part").read_text() == "half"
    assert str(tmp_path / "out.part") in capsys.readouterr().err
    with Output(str(path), append=True) as output:
        output.write(" and half")
    assert path.read_text() == "half and half" and os.listdir(tmp_path) == ["out"]
    with Output(str(path), append=True) as output:  # a whole file is gone on with where it is
        output.write("!")
        assert path.read_text() == "half and half!"


@pytest.mark.parametrize("name", ["image.png", "./image.png", "link.png", "hard.png"])
def test_what_is_read_is_not_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.png").write_text("an image")
    (tmp_path / "link.png").symlink_to("image.png")
    (tmp_path / "hard.png").hardlink_to("image.png")
    with pytest.raises(UserError, match="is also an input") as refused:
        Output(name, inputs=["other.png", str(tmp_path / "image.png")])
    assert refused.value.status == 2


@pytest.mark.parametrize("path", ["none/out", "file/out", "", "folder"])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"--out .*cannot be written \((No such file|Not a|Is a) "):
        Output(path)


def test_a_full_disk_is_a_line_and_status_1():
    with (
        pytest.raises(UserError, match=r"--out /dev/full: cannot be written.*No space left") as full,
        Output("/dev/full") as output,
    ):
        output.write("text")
    assert full.value.status == 1


def test_csv_is_what_pythons_own_reader_reads():
    rows = [["a", 'b "c"', "d,e"], ["\r", "x\ny", ""], ["ü", "\t", " f "]]
    assert list(csv.reader(io.StringIO(csv_text(rows), newline=""))) == rows


def test_columns_are_aligned_and_names_escaped():
    assert align_columns([["", "one\x1b[2J"], ["loss", "1"]]) == "      one\\x1b[2J\nloss           1"


# Going on with a file

COLUMNS = ["image", "caption", "logprob"]
NAMES = ["a.png", "b\n.png", UNDECODED, "d,\r.png", "e.png"]
ROWS = [{"image": name, "caption": f"{n} of\tfive", "logprob": -1.5} for n, name in enumerate(NAMES)]


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_a_cut_anywhere_is_gone_on_with(tmp_path, form):
    path = tmp_path / "out"
    write_records(path, form, ROWS)
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        has = find_completed(str(path), form=form, columns=COLUMNS, paths=NAMES)
        with Output(str(path), append=True) as output:
            records = Records(form=form, fields=("image", "caption"), output=output)
            for row in ROWS:
                if not has(row["image"]):
                    records.write(row)
        assert path.read_bytes() == content, end


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
@pytest.mark.parametrize(
    "foreign",
    [
        b"a line without newline",
        b"some text\nof two lines\n",
        b"red\tblue\n1\t2",
        b"a.png\tcaption\x1b\n",
        b'{"image": "a.png"}\n',
        b'{"image": "nowhere.png", "caption": "", "logprob": 1}\n',
        b"image,caption\na.png,b\n",
        b"\x89PNG\r\n\x1a\n\0\0",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_stays(tmp_path, form, foreign):
    path = tmp_path / "out"
    path.write_bytes(foreign)
    with pytest.raises(UserError, match="was not written by this command") as refused:
        find_completed(str(path), form=form, columns=COLUMNS, paths=NAMES)
    assert refused.value.status == 2 and path.read_bytes() == foreign


@pytest.mark.parametrize("terminal", [True, False])
def test_json_lines_send_no_commands_to_a_terminal_and_stay_valid(terminal, monkeypatch, capsys):
    """U+009B begins a command as escape and bracket do; JSON escapes characters below U+0020 alone."""
    record = {"image": "ü.jpg", "caption": "\x9b2J\x7f\u202erot und grün"}
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    with Output(None) as output:
        Records(form="jsonl", fields=(), output=output).write(record)
    said = capsys.readouterr().out
    assert json.loads(said) == record and "rot und grün" in said
    assert said[:-1].isprintable() == terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_sends_no_commands_to_a_terminal_and_is_exact_elsewhere(terminal, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    with Output(None) as output:
        Records(form="csv", fields=("image", "caption"), output=output).write(RECORDS[1])
    caption = r"\x1b[31mrot und grün" if terminal else RECORDS[1]["caption"]
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1] == ["ü.jpg", caption, "-2.0"]

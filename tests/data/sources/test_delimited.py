"""Quoting of CSV and TSV files: compared with plain splitting, and with pyarrow's reader of quoted cells."""

import pytest
from caption_data import NO_HOLD_OUT, picture, refusal
from pyarrow import csv as arrow

from vlm.cli.data_commands import check_data
from vlm.data.sources.captions import Captions
from vlm.data.sources.class_folders import ImageTable
from vlm.data.sources.delimited import read_rows
from vlm.data.sources.questions import QuestionTable
from vlm.data.sources.text_tables import TextTable, TranslationTable
from vlm.errors import UserError

# The keys of a record that hold the cells of the two columns of a table, by source.
SOURCES = {
    "texts": (TextTable, ("text", "label"), lambda record: (record["text"], record["class"])),
    "translations": (
        TranslationTable,
        ("text", "translation"),
        lambda record: (record["text"], record["translation"]),
    ),
    "captions": (Captions, ("image", "caption"), lambda record: (record.id, record["captions"][0])),
    "image_table": (ImageTable, ("image", "label"), lambda record: (record.values["class"],)),
}


def write(path, text):
    path.write_bytes(text.encode())
    return str(path)


def cells(source, read):
    return [read(record) for name in source.splits for record in source.split(name).records()]


def tsv_without_quoting(names):
    """A table of 60 rows: a cell begins with a quotation mark, and a later one ends with one."""
    rows = [[f"{n}.png" if names[0] == "image" else f"film {n}", f"{'ab'[n % 2]} {n // 30}"] for n in range(60)]
    place = 1 if names[0] == "image" else 0
    rows[10][place], rows[50][place] = '"a masterpiece', 'a screen of 32"'
    rows[20][place] = '"a masterpiece'
    return rows, "\t".join(names) + "\n" + "".join(f"{first}\t{second}\n" for first, second in rows)


@pytest.mark.parametrize("name", SOURCES)
def test_a_tsv_without_quoting(name, tmp_path):
    source, names, read = SOURCES[name]
    rows, text = tsv_without_quoting(names)
    for row in rows if names[0] == "image" else ():
        picture(tmp_path / row[0])
    path = write(tmp_path / "t.tsv", text)
    found = source(path=path, **NO_HOLD_OUT)
    expected = [row[1:] if name == "image_table" else row for row in rows]
    assert sorted(cells(found, read)) == sorted(map(tuple, expected))
    (note,) = found.notes
    assert "t.tsv: read without quoting, because all 61 lines have 2 cells" in note and "line 12 " in note
    assert "quoting=standard" in note
    assert cells(source(path=path, quoting="none", **NO_HOLD_OUT), read) == cells(found, read)
    assert "data.source.quoting=none" in refusal(source, path=path, quoting="standard", **NO_HOLD_OUT)


def test_questions_of_a_tsv_without_quoting(tmp_path):
    for n in range(20):
        picture(tmp_path / f"{n}.png")
    rows = [(f"{n}.png", '"where' if n == 3 else f"what {n}", 'a "' if n == 9 else "a") for n in range(20)]
    text = "image\tquestion\tanswer\n" + "".join("\t".join(row) + "\n" for row in rows)
    source = QuestionTable(path=write(tmp_path / "q.tsv", text), **NO_HOLD_OUT)
    found = [(record.id, *record["questions"][0][:2]) for record in source.split("train").records()]
    assert sorted(found) == sorted(rows) and "read without quoting" in source.notes[0]


def test_a_quoted_tsv_equals_pyarrow(tmp_path):
    text = 'text\tlabel\n"a\ttab"\tx\n"two\nlines, ""quoted"""\ty\nplain\tx\n"a\n\tb"\ty\n'
    path = write(tmp_path / "t.tsv", text)
    source = TextTable(path=path, **NO_HOLD_OUT)
    table = arrow.read_csv(
        path, parse_options=arrow.ParseOptions(delimiter="\t", newlines_in_values=True, double_quote=True)
    )
    assert cells(source, SOURCES["texts"][2]) == [(row["text"], row["label"]) for row in table.to_pylist()]
    (note,) = source.notes
    assert "t.tsv: read with quoted cells, because line 2 has 3 cells where the header has 2" in note
    stated = TextTable(path=path, quoting="standard", **NO_HOLD_OUT)
    assert cells(stated, SOURCES["texts"][2]) == cells(source, SOURCES["texts"][2]) and not stated.notes


def test_a_tsv_without_quotation_marks_is_read_without_a_note(tmp_path):
    path = write(tmp_path / "t.tsv", 'text\tlabel\na 32" screen\tx\r\nb\ty\n')
    source = TextTable(path=path, **NO_HOLD_OUT)
    assert cells(source, SOURCES["texts"][2]) == [('a 32" screen', "x"), ("b", "y")] and not source.notes


def test_rows_joined_by_stray_quotation_marks_of_a_csv_are_named(tmp_path):
    rows = [(f"film {n}", "01"[n % 2]) for n in range(40)]
    rows[7], rows[30] = ('"a masterpiece', "1"), ('of 32"', "0")
    text = "text,label\n" + "".join(f"{first},{second}\n" for first, second in rows)
    path = write(tmp_path / "t.csv", text)
    (note,) = TextTable(path=path, **NO_HOLD_OUT).notes
    assert "t.csv: 1 quoted cell may be several rows joined by stray quotation marks (lines 9 to 32: " in note
    assert "data.source.quoting=none" in note
    source = TextTable(path=path, quoting="none", **NO_HOLD_OUT)
    assert cells(source, SOURCES["texts"][2]) == rows and not source.notes
    unclosed = write(tmp_path / "u.csv", text.replace('32"', "32"))
    message = refusal(TextTable, path=unclosed, **NO_HOLD_OUT)
    assert "u.csv, line 9: " in message and "(line 41: " in message and "data.source.quoting=none" in message


@pytest.mark.parametrize("row", ['a,"two\nlines",x', '"two\nlines",b,x', 'a,b,"two\nlines, or\nthree"', 'a,"1,\n2",x'])
def test_cells_of_several_lines_are_no_joined_rows(row, tmp_path):
    text = f"text,pair,label\n{row}\nc,d,y\n"
    source = TextTable(path=write(tmp_path / "t.csv", text), pair_column="pair", **NO_HOLD_OUT)
    assert len(source.split("train")) == 2 and not source.notes


def test_a_carriage_return_ends_a_line_only_if_it_ends_the_first_one(tmp_path):
    message = refusal(TextTable, path=write(tmp_path / "t.csv", "text,label\na\rb,x\nc,y\n"), **NO_HOLD_OUT)
    assert "t.csv, line 2" in message
    source = TextTable(path=write(tmp_path / "m.csv", 'text,label\r"a\nb",x\rc,y\r'), **NO_HOLD_OUT)
    assert cells(source, SOURCES["texts"][2]) == [("a\nb", "x"), ("c", "y")]


def test_quoted_cells_of_lines_without_a_header(tmp_path):
    path = write(tmp_path / "t.csv", '1,"good, and long"\n0,bad\n')
    options = {"path": path, "columns": ["label", "text"], "delimiter": ",", **NO_HOLD_OUT}
    source = TextTable(**options)
    assert cells(source, SOURCES["texts"][2]) == [('"good, and long"', "1"), ("bad", "0")]
    assert "t.csv: line 1 has a cell in quotation marks, which are kept" in source.notes[0]
    source = TextTable(**options, quoting="standard")
    assert cells(source, SOURCES["texts"][2]) == [("good, and long", "1"), ("bad", "0")] and not source.notes
    assert not TextTable(**options, quoting="none").notes


@pytest.mark.slow
def test_the_choice_is_printed(tmp_path, capsys):
    _, text = tsv_without_quoting(("text", "label"))
    path = write(tmp_path / "t.tsv", text)
    assert check_data(["task=text_classification", "data=texts", f"data.path={path}"]) in (0, 1)
    assert f"note: {path}: read without quoting" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_first_line_that_states_the_delimiter(tmp_path, end):
    """Excel reads and writes such a line; the table is the one without it, and lines keep their numbers."""
    lines = ["text;label", *(f'"film, {n}";{"ab"[n % 2]}' for n in range(40))]
    plain = TextTable(path=write(tmp_path / "plain.csv", end.join([*lines, ""])), **NO_HOLD_OUT)
    stated = TextTable(path=write(tmp_path / "stated.csv", end.join(["sep=;", *lines, ""])), **NO_HOLD_OUT)
    read = SOURCES["texts"][2]
    assert cells(stated, read) == cells(plain, read) and len(cells(stated, read)) == 40
    lines[5] = "film"
    damaged = TextTable(path=write(tmp_path / "damaged.csv", end.join(["sep=;", *lines, ""])), **NO_HOLD_OUT)
    assert "line 7" in "".join(damaged.skipped)


@pytest.mark.parametrize("after", ["", '14,"fine, this"\n15,x\n'])
def test_a_quotation_mark_without_an_end_is_named_where_its_cell_begins(after, tmp_path):
    rows = [f"{number},text {number}\n" for number in range(3, 14)]
    (path := tmp_path / "t.csv").write_text('id,text\n1,"two\nlines ""so"""\n2,"open\n' + "".join(rows) + after)
    with pytest.raises(UserError, match="line 4: the quoted cell that begins here does not end properly"):
        list(read_rows(path, path.read_text(), ",", "auto", []))

"""Generated tables with odd cells, compared with pyarrow's readers and with the cells that were written.

Each case is read equally, or refused, or what differs is named in a note or in `skipped`; never silently different.
"""

import csv
import io
import json
import random
from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import pytest

from vlm.data.sources.text_tables import TextTable
from vlm.errors import UserError

PIECES = ['"', '""', ",", ";", "\t", "|", "\n", "\r", "\r\n", " ", "\\", '\\"', "'", "#", "=", "\u2028", "\x85", "\x0b"]
PIECES += ["\x0c", "\xa0", "\u200b", "\ufeff", "é", "\u202e", "漢", "\U0001f468", "{", "[", "null", "NaN"]
WORDS = ["NA", "null", "nan", "None", "N/A", "", "-1", "1", "1.0", "1e5", "007", "true", "False", "a", "b", "a film"]
NAMES = ["text", "label"]
SLOW, NIGHTLY = 60, 1200  # cases of each format


def draw_cell(rng: random.Random, odd: float) -> str:
    if rng.random() >= odd:
        return rng.choice(WORDS) if rng.random() < 0.4 else f"film {rng.randrange(99)}"
    return "".join(rng.choice([*PIECES, "x", "yz"]) for _ in range(rng.randint(1, 5)))


def draw_rows(rng: random.Random) -> list[list[str]]:
    odd = rng.choice([0, 0.1, 0.3, 0.6])
    rows = [[draw_cell(rng, odd), draw_cell(rng, odd / 2)] for _ in range(rng.randint(2, 9))]
    return [*rows, ["plain", "x"], ["plainer", "y"]]


class ReadTable(NamedTuple):
    """The texts and labels of a table in order, what is left out, and how it was read."""

    rows: list[tuple[str, str]]
    skipped: list[str]
    notes: list[str]


def read(path) -> ReadTable | None:
    """Reads a table; None if it is refused."""
    try:
        source = TextTable(path=str(path), val_fraction=0.0, test_fraction=0.0)
    except UserError as fault:
        assert str(path) in str(fault), fault
        return None
    records = list(source.split("train").records())
    assert all(line.startswith(f"{path}") for line in [*source.skipped, *source.notes])
    return ReadTable([(record["text"], record["class"]) for record in records], source.skipped, source.notes)


def judge(found: ReadTable | None, expected: list[list[str | None]] | None, *, valid: bool = True) -> str:
    """How a table was read: refused, equal, or named in a note; fails on a silent difference.

    Args:
        expected: The cells of the reference; None if it refuses the table. Rows with an empty cell must be skipped.
        valid: Whether a table that the reference reads must be read, if two labels are left.
    """
    kept = [tuple((cell or "").strip() for cell in row) for row in expected or []]
    full = [row for row in kept if all(row)]
    if found is None:
        assert not valid or len({label for _, label in full}) < 2, f"a valid table is refused: {expected}"
        return "refused"
    if expected is not None and found.rows == full and len(found.skipped) == len(kept) - len(full):
        return "equal"
    assert found.notes, f"silent: {found} instead of {expected}"
    return "named"


def arrow_rows(data: bytes, delimiter: str) -> list[list[str | None]] | None:
    """The rows as pyarrow reads them, all cells as text; None if it refuses."""
    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(data),
            read_options=pyarrow.csv.ReadOptions(use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(NAMES, pa.string()), strings_can_be_null=False
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return None
    return [[row[name] for name in NAMES] for row in table.to_pylist()] if set(NAMES) <= {*table.column_names} else None


def damage(rng: random.Random, text: str) -> str:
    """A text with one stray piece more, or one character less, after its header."""
    start = text.index("label") + 6
    at = rng.randint(min(start, len(text)), len(text))
    if rng.random() < 0.5:
        return text[:at] + rng.choice(['"', '"', '"', ",", "\t", "\r", "\n", "\n\n"]) + text[at:]
    return text[:at] + text[at + 1 :]


def written_csv(rng: random.Random, rows: list[list[str]], delimiter: str) -> str:
    file = io.StringIO(newline="")
    quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
    end = rng.choice(["\n", "\r\n"])
    csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=end).writerows([NAMES, *rows])
    return file.getvalue()


def join_rows(rng: random.Random, rows: list[list[str]], delimiter: str) -> str:
    """The rows without quoting."""
    end = rng.choice(["\n", "\n", "\r\n"])
    return "".join(delimiter.join(row) + end for row in [NAMES, *rows])


def csv_case(seed: int, folder) -> str:
    rng = random.Random(f"csv {seed}")
    kinds = [(".csv", ","), (".csv", ","), (".tsv", "\t"), (".tsv", "\t"), (".csv", ";"), (".txt", "|")]
    suffix, delimiter = rng.choice(kinds)
    rows = draw_rows(rng)
    kind = rng.choice(["quoted", "quoted", "damaged", "joined"])
    text = join_rows(rng, rows, delimiter) if kind == "joined" else written_csv(rng, rows, delimiter)
    text = damage(rng, text) if kind == "damaged" else text
    data = (rng.choice(["", "", "\ufeff"]) + text).encode()
    path = folder / f"t{suffix}"
    path.write_bytes(data)
    found, expected = read(path), arrow_rows(data, delimiter)
    # Of a quoted table these are the cells that were written. Python's writer puts no quotes around a carriage return.
    written = kind == "quoted" and "\r" not in text.replace("\r\n", "")
    return judge(found, rows if written else expected, valid=written)


def json_value(rng: random.Random, label: bool) -> str:
    plain = json.dumps(draw_cell(rng, 0.4), ensure_ascii=rng.random() < 0.5)
    others = [
        "null",
        "1",
        "-7",
        "1.5",
        "true",
        "false",
        "NaN",
        "[]",
        '["a"]',
        "{}",
        '"\\ud800"',
        "1e3",
        str(10**18),
        "'a'",
    ]
    return rng.choice(others) if rng.random() < (0.25 if label else 0.08) else plain


def json_case(seed: int, folder) -> str:
    rng = random.Random(f"json {seed}")
    lines = ['{"text": "plain", "label": "x"}', '{"text": "plainer", "label": "y"}']
    for _ in range(rng.randint(1, 4)):
        cells = [("text", json_value(rng, False)), ("label", json_value(rng, True))]
        if (extra := rng.random()) < 0.2:
            cells += [rng.choice([("text", '"b"'), ("label", '"z"'), ("Text", '"c"'), ("other", "1")])]
        cells = cells[:1] if extra > 0.95 else cells
        lines.append("{" + ", ".join(f'"{key}": {value}' for key, value in cells) + "}")
    rng.shuffle(lines)
    whole = rng.random() < 0.3
    end = rng.choice(["\n", "\r\n", "\n\n"])
    text = f"[{','.join(lines)}]" if whole else end.join(lines) + rng.choice(["", end])
    valid = True
    path = folder / ("t.json" if whole else "t.jsonl")
    path.write_text(rng.choice(["", "", "\ufeff"]) + text, encoding="utf-8", newline="")
    expected: list[list[str | None]] | None = []
    for line in lines:  # each row apart, because pyarrow wants one type for all
        try:
            row = pyarrow.json.read_json(io.BytesIO(line.encode())).to_pylist()[0]
        except pa.ArrowInvalid:
            expected = None
            break
        valid &= {*NAMES} <= {*row}
        cells = [row.get(name) for name in NAMES]
        cells[1] = str(cells[1]) if isinstance(cells[1], int) else cells[1]
        if not all(cell is None or isinstance(cell, str) for cell in cells):
            expected = None
            break
        expected.append(cells)
    return judge(read(path), expected, valid=valid)


TYPES = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.binary(), pa.null(), pa.int8()]
TYPES += [pa.uint64()]
TYPES += [pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.decimal128(5, 1), pa.date32(), pa.timestamp("ms")]
TYPES += [pa.list_(pa.string()), pa.string_view()]


def arrow_column(rng: random.Random, kind, size: int):
    cells = [None if rng.random() < 0.2 else rng.choice([0, 1, 2]) for _ in range(size)]
    if pa.types.is_floating(kind):
        cells = [rng.choice([cell, float("nan")]) for cell in cells]
    if pa.types.is_list(kind):
        cells = [None if cell is None else [str(cell)] for cell in cells]
    if kind in TYPES[:4] or kind == pa.string_view():
        cells = [None if cell is None else draw_cell(rng, 0.5) for cell in cells]
    if pa.types.is_null(kind):
        cells = [None] * size
    if pa.types.is_boolean(kind):
        cells = [None if cell is None else bool(cell) for cell in cells]
    if pa.types.is_binary(kind):
        cells = [None if cell is None else cell.encode() for cell in cells]
    return pa.array(cells, kind)


def arrow_case(seed: int, folder) -> str:
    rng = random.Random(f"arrow {seed}")
    size = rng.randint(3, 9)
    kinds = [rng.choice([*TYPES[:3] * 9, *TYPES]), rng.choice([*TYPES[:3] * 3, *TYPES])]
    columns = [arrow_column(rng, kind, size) for kind in kinds]
    table = pa.table(columns, names=NAMES)
    classes = None
    if pa.types.is_integer(kinds[1]) and rng.random() < 0.5:
        classes = ["cat", "ant", "bee"][: rng.choice([2, 3, 3])]
        cells = [rng.choice([cell, cell, -1 if kinds[1] != pa.uint64() else cell]) for cell in columns[1].to_pylist()]
        table = pa.table([columns[0], pa.array(cells, kinds[1])], names=NAMES)
        features = {"label": {"_type": "ClassLabel", "names": classes}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    if rng.random() < 0.7:
        path = folder / f"{seed}.parquet"  # columnar files are memory-mapped and opened once per process
        pyarrow.parquet.write_table(table, path, row_group_size=rng.choice([2, 100]))
        table = pyarrow.parquet.read_table(path)
    else:
        path = folder / f"{seed}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    expected = []
    for row in table.to_pylist():
        text, label = row["text"], row["label"]
        if classes and label is not None:  # -1 stands for an unknown label in `datasets`
            label = None if label == -1 else classes[label] if label < len(classes) else object()
        label = str(label) if isinstance(label, int) else label
        if not all(cell is None or isinstance(cell, str) for cell in (text, label)):
            expected = None
            break
        expected.append([text, label])
    return judge(read(path), expected)


CASES = {"csv": csv_case, "json": json_case, "arrow": arrow_case}


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize(
    ("first", "count"),
    [pytest.param(0, SLOW, marks=pytest.mark.slow), pytest.param(SLOW, NIGHTLY, marks=pytest.mark.nightly)],
)
def test_no_table_is_read_differently_in_silence(form, first, count, tmp_path):
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            outcomes[CASES[form](seed, tmp_path)] += 1
        except AssertionError as fault:
            raise AssertionError(f"{form} {seed}: {fault}") from fault
    assert outcomes["equal"] > count / 5 and outcomes["refused"] > count / 20, outcomes

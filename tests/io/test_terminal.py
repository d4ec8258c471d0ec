"""Lines for people are folded where a reader would break them, and on a terminal alone."""

import pytest

from vlm.io.terminal import folded

SCORES = "step 24: " + "  ".join(f"metric{n} 0.{n:04}" for n in range(30))
SAMPLE = "  'A man in a shirt .'" + " " * 40 + "reference: 'Two children in swimsuits stand talking in a lake .'"
CAUSE = "  - images that do not belong to their captions: see some of them with vlm check-data --out DIR, or --beam 4"
NAMED = "pace        1.2 s a step: about 6 s an epoch of 5 steps, 2 min to the end, without validation, as it is now"


@pytest.fixture(params=[40, 60, 80, 86, 120])
def width(request, monkeypatch) -> int:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


@pytest.mark.parametrize("line", [SCORES, SAMPLE, CAUSE, NAMED])
def test_a_line_that_is_too_long_is_folded_between_words(line: str, width: int) -> None:
    rows = folded(line).split("\n")
    assert max(map(len, rows)) < width and " ".join(rows).split() == line.split()
    assert len(rows) == 1 or len(line) >= width
    assert all(row.startswith("    ") for row in rows[1:])


def test_a_score_stays_with_its_name_and_an_option_with_its_value(width: int) -> None:
    assert all(f"metric{n} 0.{n:04}" in folded(SCORES) for n in range(30))
    assert "--out DIR" in folded(CAUSE) and "--beam 4" in folded(CAUSE)


def test_columns_part_first(width: int) -> None:
    apart = folded(SAMPLE).split("\n")[0] == "  'A man in a shirt .'"
    assert apart == (width < 90)  # in 120 columns both fit side by side


def test_the_text_of_a_named_line_keeps_its_column(width: int) -> None:
    assert all(row.startswith(" " * 12) and row[12] != " " for row in folded(NAMED).split("\n")[1:])


def test_a_file_gets_whole_lines() -> None:
    assert folded(SCORES) == SCORES

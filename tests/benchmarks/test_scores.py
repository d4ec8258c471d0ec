"""The bars of docs/scores.png are those of its table, whose scores are in the documents."""

import re
from hashlib import sha256

import pytest
from PIL import Image
from scripts import load


def test_scores_are_those_of_the_documents(monkeypatch, pytestconfig):
    docs = pytestconfig.rootpath / "docs"
    written = {float(number) for name in ("results", "tried") for number in read_numbers(docs / f"{name}.md")}
    for question, bars in load("scores", monkeypatch).read_bars(docs / "scores.csv").items():
        for setting, *numbers in bars:
            missing = [number for number in numbers if number not in written]
            assert not missing, (question, setting, missing)


def test_the_picture_is_up_to_date(pytestconfig):
    docs = pytestconfig.rootpath / "docs"
    described = Image.open(docs / "scores.png").info["Description"]
    assert described == sha256((docs / "scores.csv").read_bytes()).hexdigest(), "run python benchmarks/scores.py"


def test_a_table_is_drawn_and_a_wrong_interval_refused(monkeypatch, tmp_path):
    module, table = load("scores", monkeypatch), tmp_path / "table.csv"
    table.write_text("question,setting,score,low,high\nA,one,1.5,1,2\nA,two,3,,\nB,one,0.5,0.4,0.6\n")
    assert module.read_bars(table) == {"A": [("one", 1.5, 1, 2), ("two", 3, 3, 3)], "B": [("one", 0.5, 0.4, 0.6)]}
    module.draw(table, tmp_path / "bars.png")
    assert Image.open(tmp_path / "bars.png").size[0] == 990
    table.write_text("question,setting,score,low,high\nA,one,2.5,1,2\n")
    with pytest.raises(ValueError, match=r"A, one: 2\.5 is outside 1\.0 to 2\.0"):
        module.read_bars(table)


def read_numbers(path):
    return re.findall(r"\d+\.\d+|\d+", path.read_text(encoding="utf-8"))

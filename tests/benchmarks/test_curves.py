"""The script that draws validation curves reads what a run wrote."""

import sys
from pathlib import Path

import pytest
from scripts import load

ROWS = "step,train/loss,val/loss,val/cider\n4,3.5,,\n9,,2.5,0.1\n14,3.0,,\n19,,2.25,0.2\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.csv").write_text(ROWS)
    return tmp_path


def test_a_curve_has_the_values_of_its_metric(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_curve = load("curves", monkeypatch).read_curve
    assert read_curve(run, "val/loss") == ([10, 20], [2.5, 2.25])
    assert read_curve(run, "val/cider") == ([10, 20], [0.1, 0.2])
    with pytest.raises(ValueError, match="no values of val/bleu4; choose from val/loss, val/cider"):
        read_curve(run, "val/bleu4")


def test_a_picture_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, one, both = load("curves", monkeypatch), run / "one.png", run / "both.png"
    module.draw({"a": run}, ["val/loss"], one)
    options = ["--metrics", "val/loss", "val/cider", "--out", str(both)]
    monkeypatch.setattr(sys, "argv", ["curves.py", f"lr = 1={run}", f"b={run}", *options])
    module.main()
    assert one.read_bytes()[:4] == both.read_bytes()[:4] == b"\x89PNG" and one.read_bytes() != both.read_bytes()

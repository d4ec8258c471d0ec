"""A sheet of captioned images is written whole or not at all."""

import pytest
from PIL import Image

from vlm.evaluation.report import pictures


def test_a_sheet_takes_the_place_of_the_old_one(tmp_path):
    (tmp_path / "sheet").write_text("old")
    pictures.contact_sheet([Image.new("RGB", (8, 8))], ["a caption"], str(tmp_path / "sheet"))
    with Image.open(tmp_path / "sheet") as image:
        assert image.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["sheet"]


def test_a_sheet_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    def fill(figure, file, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill)
    (tmp_path / "sheet.png").write_text("old")
    with pytest.raises(OSError, match=r"sheet\.png"):
        pictures.contact_sheet([Image.new("RGB", (8, 8))], ["a caption"], str(tmp_path / "sheet.png"))
    assert (tmp_path / "sheet.png").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]

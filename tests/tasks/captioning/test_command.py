"""`vlm caption --sidecar`: a caption beside each photo."""

import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import ROOT

from vlm.cli.main import run

CAPTIONER = str(ROOT / "data" / "sample" / "captioner.ckpt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        shutil.copy(ROOT / "data" / "sample" / f"test-0-{number:06d}.png", tmp_path / f"photo{number}.png")
    return tmp_path


def sidecars(folder: Path, *options: str) -> int:
    return run(["caption", str(folder), "-c", CAPTIONER, "--sidecar", *options])


@pytest.mark.slow
def test_a_caption_lies_beside_each_photo(folder, capsys):
    (folder / "photo1.txt").write_text("my own words\n")
    assert run(["caption", str(folder), "-c", CAPTIONER]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    captions = {Path(path).with_suffix(".txt"): f"{caption}\n" for path, caption in lines}
    assert sidecars(folder) == 0 and capsys.readouterr().out == ""
    written = {path: path.read_text() for path in folder.glob("*.txt")}
    assert written == {**captions, folder / "photo1.txt": "my own words\n"}
    assert len(list(folder.iterdir())) == 6  # nothing else is left there
    assert sidecars(folder, "--overwrite") == 0
    assert {path: path.read_text() for path in folder.glob("*.txt")} == captions


def test_a_damaged_photo_has_none_and_keeps_no_other_from_its_own(folder, capsys):
    (folder / "photo0.png").write_bytes(b"\x89PNG damaged")
    assert sidecars(folder) == 1
    assert capsys.readouterr().err.startswith(f"error: {folder / 'photo0.png'}: ")
    assert sorted(path.name for path in folder.glob("*.txt")) == ["photo1.txt", "photo2.txt"]


def test_sidecars_that_cannot_be_are_a_line(folder, capsys):
    shutil.copy(folder / "photo0.png", folder / "photo0.jpg")
    assert sidecars(folder) == 2
    assert "would share" in capsys.readouterr().err and not list(folder.glob("*.txt"))
    (folder / "photo0.jpg").unlink()
    (folder / "photo0.txt").mkdir()
    assert sidecars(folder, "--overwrite") == 1
    assert capsys.readouterr().err.startswith(f"error: {folder / 'photo0.txt'}: cannot be written (Is a directory)")


def test_options_without_a_part_are_refused(folder, capsys):
    for options in (["--out", "x"], ["--format", "jsonl"], ["--continue"], ["--sample", "--results", "2"]):
        assert sidecars(folder, *options) == 2
        assert "cannot be combined with --sidecar" in capsys.readouterr().err, options
    assert run(["caption", str(folder), "-c", CAPTIONER, "--overwrite"]) == 2
    assert "give --sidecar too" in capsys.readouterr().err

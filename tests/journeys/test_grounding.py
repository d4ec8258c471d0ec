"""A model that was trained on other images than its captions tell of is found out; an honest one is left alone."""

import csv
from pathlib import Path

import pytest
from journey import only_run

from vlm.data.records import Record
from vlm.data.shapes.scene_source import GeneratedSplit
from vlm.training.run.fit import main

# The default data, model and schedule, on a sixteenth of the scenes.
SHORT = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.source.train_scenes=1600"]
SHORT += ["data.source.val_scenes=128", "data.source.test_scenes=32"]


def gaps(runs: Path) -> list[float]:
    """The share of each validation's loss that other images add to it."""
    with (only_run(runs) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    return [float(row["val/loss@shuffled"]) / float(row["val/loss"]) - 1 for row in rows]


@pytest.mark.nightly  # tasks/shared/test_image_use.py says when no warning comes in a plain run
def test_the_default_is_left_alone(tmp_path: Path, capsys) -> None:
    assert main([*SHORT, f"runs={tmp_path}"]) == 0
    captured = capsys.readouterr()
    assert "ignored its images" not in captured.err
    assert len(gaps(tmp_path)) == 3 and min(gaps(tmp_path)[1:]) > 0.05
    assert "loss@shuffled" in captured.out and "loss@blank" in captured.out


@pytest.mark.slow
def test_shuffled_images_raise_the_warning_and_stop_the_run_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    plain = GeneratedSplit.record

    def mixed_up(split: GeneratedSplit, index: int, epoch: int = 0) -> Record:
        one = plain(split, index, epoch)
        if split.name == "train":
            one.open_image = plain(split, (index + 1) % len(split), epoch).open_image  # that of another scene
        return one

    monkeypatch.setattr(GeneratedSplit, "record", mixed_up)
    stop = ["callbacks.grounding.stop=true", "callbacks.grounding.patience=2"]
    assert main([*SHORT, *stop, f"runs={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "warning: in 2 validations in a row, the model ignored its images" in said
    assert "images that do not match their captions" in " ".join(said.split()) and "few steps" in said
    assert "error: the model ignores its images" in said and "callbacks.grounding.stop=true" in said
    assert len(gaps(tmp_path)) == 2 and all(abs(gap) < 0.01 for gap in gaps(tmp_path))
    assert (only_run(tmp_path) / "checkpoints" / "last.ckpt").is_file()

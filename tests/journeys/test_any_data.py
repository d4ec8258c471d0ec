"""Any data with any task whose values its records hold: sources that ship, and one of a user's own."""

from pathlib import Path

import pytest
from caption_data import picture
from class_data import pack
from sharded import caption_members, write_tar

from vlm.config import target
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow

SMALL = ["trainer=cpu", "trainer.max_epochs=1", "callbacks.progress=null", "data.image_size=32", "data.num_workers=0"]
SMALL += ["data.batch_size=8", "model.size.dim=32", "model.size.num_heads=2", "model.size.encoder_depth=1"]
TASKS = {
    "captioning": ["task=captioning", "tokenizer=char", "data.max_len=32", "model.size.decoder_depth=1"],
    "classification": ["task=classification"],
}

SOURCE = '''
from PIL import Image

from vlm.data.records import ListSplit, Record, Source

COLORS = ("red", "blue")


class Pictures(Source):
    """Pictures of one colour, each with its name as its caption and as its class."""

    holds = ("image", "captions", "label")
    splits = ("train", "val")
    classes = COLORS

    def __init__(self, *, count: int, side: int = 40) -> None:
        self.count, self.side = count, side

    def open(self, name):
        return ListSplit(range(self.count), self.picture)

    def picture(self, index, epoch):
        color = COLORS[index % 2]
        texts = [f"a {color} picture"]
        known = {"captions": texts, "references": texts, "label": index % 2, "class": color}
        return Record(f"{index}", known, lambda: Image.new("RGB", (self.side, self.side), color))
'''
CONFIG = """
defaults: [base/photos@_here_, _self_]
source:
  _target_: own_pictures.Pictures
  count: 16
"""


def train(task: str, folder: Path, *overrides: str) -> int:
    return main([*overrides, *TASKS[task], *SMALL, f"runs={folder}"])


@pytest.fixture
def own(tmp_path, monkeypatch) -> list[str]:
    """A source of one's own: a Python file and a YAML file."""
    (tmp_path / "own_pictures.py").write_text(SOURCE)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "own.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(target, "_allowed", [*target._allowed])
    target.trust("own_pictures", "other_pictures", "lacking_pictures")
    return ["--config-dir", str(tmp_path / "conf"), "data=own"]


@pytest.mark.parametrize("task", TASKS)
def test_a_source_of_ones_own_trains(own, task, tmp_path, capsys):
    assert train(task, tmp_path / "runs", *own) == 0
    assert "the best checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["captioning", pytest.param("classification", marks=pytest.mark.slow)])
def test_shards_with_captions_and_classes_train_either_task(task, tmp_path):
    for split, first in (("train", 0), ("val", 16)):
        classes = {f"{number:09d}.cls": "ab"[number % 2] for number in range(first, first + 16)}
        write_tar(tmp_path / "set" / split / "0.tar", caption_members(16, first) | classes)
    assert train(task, tmp_path / "runs", "data=webdataset", f"data.root={tmp_path / 'set'}") == 0


def test_captions_of_a_tar(tmp_path):
    for number in range(16):
        picture(tmp_path / "photos" / f"{number}.png", ("red", "blue")[number % 2])
    pack(tmp_path / "photos.tar", tmp_path / "photos")
    rows = "".join(f"{number}.png,picture {number},{'val' if number < 4 else 'train'}\n" for number in range(16))
    (tmp_path / "captions.csv").write_text(f"image,caption,split\n{rows}")
    given = [f"data.root={tmp_path / 'photos.tar'}", f"data.path={tmp_path / 'captions.csv'}"]
    assert train("captioning", tmp_path / "runs", "data=captions", *given) == 0


def test_a_source_that_does_not_hold_what_the_task_reads_is_refused(own, tmp_path, capsys):
    (tmp_path / "other_pictures.py").write_text(SOURCE.replace(', "label")', ")"))
    overrides = [*own, "data.source._target_=other_pictures.Pictures"]
    assert train("classification", tmp_path / "runs", *overrides) == 2
    said = capsys.readouterr().err
    assert "data: records of Pictures hold image and captions" in said and "task=classification" in said
    assert "label" in said and len(said.splitlines()) <= 2


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_that_lacks_a_value_is_named(own, workers, tmp_path, capsys):
    text = SOURCE.replace("known = {", "known = {} if index == 15 else {")
    (tmp_path / "lacking_pictures.py").write_text(text)
    overrides = [*own, "data.source._target_=lacking_pictures.Pictures", f"++data.num_workers={workers}"]
    assert train("classification", tmp_path / "runs", *overrides) != 0
    assert "data: 15 has no label; use data that has it, or another task" in capsys.readouterr().err

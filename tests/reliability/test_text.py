"""Captions and text as people write them, and tokenizers that are damaged or another's."""

import json
import re
from pathlib import Path

import pytest

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.file import write
from vlm.cli import main as cli
from vlm.data.shapes.scene_captions import Shapes, write_coco
from vlm.data.shapes.scenes import COLORS
from vlm.data.text.tokenizer import CharTokenizer
from vlm.errors import UserError
from vlm.io.output import Output, Records
from vlm.training.run.fit import main

TEXTS = ["a red circle on the left", "two blue squares", "ein grünes Dreieck", "赤い丸"] * 20
CONTROLS = "a red\x1b[2J\x1b]0;owned\x07 circle\x08\x9b31m \u202e"
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def photos(tmp_path) -> Path:
    """Eight images, two captions each."""
    folder = tmp_path / "photos"
    folder.mkdir()
    scenes = {"train_scenes": 8, "val_scenes": 1, "test_scenes": 1}
    kinds = {"shapes": ["circle", "square"], "colors": list(COLORS)[:4], "sizes": ["small", "large"]}
    write_coco(Shapes(seed=0, image_size=48, captions_per_image=2, **scenes, **kinds), folder, "train", 8)
    return folder


def test_what_is_told_of_a_fault_sends_no_commands():
    said = str(UserError(f"{CONTROLS}: cannot be read\ntry another"))
    assert not COMMANDS.search(said.replace("\n", ""))
    assert said.endswith(": cannot be read\ntry another")
    assert str(UserError(str(UserError(CONTROLS)))) == str(UserError(CONTROLS))


def test_a_record_sends_no_commands(capsys):
    records = Records(form="text", fields=("image", "caption"), output=Output(None))
    records.write({"image": f"{CONTROLS}.png", "caption": CONTROLS})
    said = capsys.readouterr().out
    assert not COMMANDS.search(said.replace("\n", "")) and said.count("\n") == 1
    assert r"\x1b[2J" in said


@pytest.mark.slow
def test_a_training_on_strange_captions(photos, tmp_path, capsys):
    strange = [[CONTROLS, "a </s> b"], ["<pad> <pad>", ""], ["a long one " * 500], ["赤い丸", "\u200d"]]
    strange += [[CONTROLS], ["</s>"], ["nul \0 in it"], ["x"]]
    names = sorted(path.name for path in photos.glob("*.png"))
    rows = [{"image": name, "caption": texts} for name, texts in zip(names, strange, strict=True)]
    (photos / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fractions = ["data.source.val_fraction=0.4", "data.source.test_fraction=0"]
    data = ["data=captions", f"data.root={photos}", "data.path=captions.jsonl", "data.image_size=32", *fractions]
    sizes = [f"model.size.{name}" for name in ("dim=32", "num_heads=2", "encoder_depth=1", "decoder_depth=1")]
    small = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.batch_size=4", "data.max_len=32"]
    runs = tmp_path / "runs"
    assert main([*small, *data, *sizes, "tokenizer=bytes", "trainer.max_epochs=1", f"runs={runs}"]) == 0
    said = capsys.readouterr().out
    assert not COMMANDS.search(said)
    assert "captions.jsonl, line 2: no caption" in said
    (checkpoint,) = runs.glob("*/*/checkpoints/last.ckpt")
    odd = photos / "a\x1b[31m.png"
    (photos / names[0]).rename(odd)
    (photos / "b\x1b[31m.png").write_bytes(b"no image")
    images = [str(odd), str(photos / "b\x1b[31m.png")]
    assert cli.run(["caption", *images, "-c", str(checkpoint), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert not COMMANDS.search(told.out) and not COMMANDS.search(told.err)
    assert r"b\x1b[31m.png: " in told.err

    loaded = ckpt.read(checkpoint)
    loaded["vlm"]["scores"] = {CONTROLS: 1.0}
    write(tmp_path / "odd.ckpt", loaded)
    assert cli.run(["info", "-c", str(tmp_path / "odd.ckpt")]) == 0
    assert not COMMANDS.search(capsys.readouterr().out)

    other = CharTokenizer().fit(TEXTS).state()
    loaded["vlm"]["tokenizer"] = other
    write(tmp_path / "other.ckpt", loaded)
    assert cli.run(["caption", images[0], "-c", str(tmp_path / "other.ckpt"), "--device", "cpu"]) == 2
    assert "tokens, its model" in capsys.readouterr().err

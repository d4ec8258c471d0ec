"""Each kind of processor trains and decodes: by the types that it is fast in, with packed weights where it packs."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from processors import FAST_BFLOAT16, PROCESSORS, pretend

from vlm.cli.main import run as vlm
from vlm.nn.device import choose_precision
from vlm.nn.step import packed
from vlm.training.run.build import build_trainer

SAMPLE = Path(__file__).parents[2] / "data" / "sample"


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    pretend(monkeypatch, request.param)
    yield request.param
    packed.packs.cache_clear()


def test_the_precision_of_training_and_of_decoding(processor: str, tmp_path: Path) -> None:
    low = processor in FAST_BFLOAT16
    trainer = {"_target_": "lightning.Trainer", "accelerator": "cpu"}
    precision = build_trainer({"trainer": trainer}, tmp_path, logger=False).precision
    assert precision == ("bf16-mixed" if low else "32-true")
    assert choose_precision("auto", "cpu") == (torch.bfloat16 if low else torch.float32)


def test_what_is_packed(processor: str) -> None:
    assert {dtype for dtype in (torch.float32, torch.bfloat16) if packed.packs(dtype)} == PROCESSORS[processor][1]


@pytest.mark.sample(plain=4, slow=4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captions_are_true_in_each_precision(processor: str, precision: str, capsys) -> None:
    content = json.loads((SAMPLE / "captions.json").read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    true = defaultdict(set)
    for annotation in content["annotations"]:
        true[names[annotation["image_id"]]].add(annotation["caption"])
    options = ["--device", "cpu", "--precision", precision]
    assert vlm(["caption", str(SAMPLE), "-c", str(SAMPLE / "captioner.ckpt"), *options]) == 0
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    wrong = [path for path, caption in lines.items() if caption not in true[Path(path).name]]
    assert len(lines) == len(true) and len(wrong) <= (1 if precision == "bf16" else 0)

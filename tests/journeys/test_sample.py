"""The sample that is shipped: scenes, and a model that captions each of them with a true caption."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from vlm.cli.main import run as vlm
from vlm.nn.device import explain_int8

INT8 = ["--precision", "int8"]
SAMPLE = Path(__file__).parents[2] / "data" / "sample"


@pytest.mark.parametrize("options", [[], ["--beam", "4"], ["--precision", "fp32"], INT8], ids=" ".join)
def test_the_shipped_model_captions_the_shipped_scenes(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if options == INT8 and not explain_int8("cpu")[0]:
        pytest.skip("this build of torch has no FBGEMM for this processor")
    content = json.loads((SAMPLE / "captions.json").read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    true = defaultdict(set)
    for annotation in content["annotations"]:
        true[names[annotation["image_id"]]].add(annotation["caption"])
    assert vlm(["caption", str(SAMPLE), "-c", str(SAMPLE / "captioner.ckpt"), "--device", "cpu", *options]) == 0
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert {Path(path).name for path in lines} == set(true)
    assert all(caption in true[Path(path).name] for path, caption in lines.items())

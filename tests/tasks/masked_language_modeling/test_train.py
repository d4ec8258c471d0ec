"""Training on texts of one's own."""

import json
from pathlib import Path

import pytest

from vlm.training.run.fit import main as train

TINY = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.batch_size=8", "test=false"]
TINY += ["model.size.dim=16", "model.size.num_heads=2", "model.size.encoder_depth=1", "trainer.max_steps=2"]
LINES = [
    f"the {color} {thing} is near." for color in ("red", "green", "blue", "gray") for thing in ("cat", "dog", "cow")
]


@pytest.mark.parametrize("kind", ["file", "folder", "csv", "jsonl"])
def test_texts_without_labels_train(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for place in range(0, 12, 3):
        (tmp_path / "folder" / f"{place}.txt").write_text("\n\n".join(LINES[place : place + 3]))
    (tmp_path / "file.txt").write_text("\n".join(LINES))
    (tmp_path / "table.csv").write_text("\n".join(["text", *LINES]))
    (tmp_path / "table.jsonl").write_text("\n".join(json.dumps({"text": line, "label": None}) for line in LINES))
    data = {
        "file": ["data=text", "data.path=file.txt"],
        "folder": ["data=text", "data.root=folder"],
        "csv": ["data=texts", "data.path=table.csv"],
        "jsonl": ["data=texts", "data.path=table.jsonl"],
    }
    assert train(["task=masked_language_modeling", *data[kind], *TINY]) == 0
    (metrics,) = tmp_path.glob("runs/*/*/metrics.csv")
    assert len(metrics.read_text().splitlines()) > 1

"""Captions with their images, references and losses at each validation: in samples/, and in TensorBoard."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from vlm.cli.main import run as vlm
from vlm.training.callbacks.fault_tolerant_logger import FaultTolerantLogger
from vlm.training.callbacks.samples import Samples
from vlm.training.run.fit import main


def test_what_tensorboard_gets(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    logger = FaultTolerantLogger(SimpleNamespace(experiment=writer), "tensorboard")
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    logger.log_samples([{"line": "= 'a *dog*'", "image": image}, {"line": "text\nalone"}], step=7)
    writer.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0})
    found.Reload()
    assert found.Tags()["images"] == ["val/samples/0"] and found.Images("val/samples/0")[0].step == 7
    (event,) = found.Tensors("val/samples/text_summary")
    assert event.tensor_proto.string_val[0].decode() == "    = 'a *dog*'\n\n    text\n    alone\n"


@pytest.mark.slow
def test_a_runs_samples_are_cocos(tmp_path: Path, capsys) -> None:
    small = ["debug=fast", "trainer.accelerator=cpu", "model.size.dim=32", "model.size.num_heads=2"]
    assert main([*small, "logger=tensorboard", f"runs={tmp_path}"]) == 0
    (folder,) = tmp_path.glob("*/20*")
    (file,) = (folder / "samples").glob("step_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 8 and all(row.keys() == {"image_id", "caption", "references", "loss"} for row in rows)
    assert all(row["loss"] > 0 for row in rows)
    notes = [{"image_id": row["image_id"], "caption": text} for row in rows for text in row["references"]]
    (tmp_path / "references.json").write_text(json.dumps({"annotations": notes}))
    assert vlm(["score", str(file), str(tmp_path / "references.json"), "--no-java"]) == 0
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    assert len(events.Tags()["images"]) == 4
    # Of a few batches no sample's partner is read, so there is no loss beside shuffled images.
    assert {"val/loss@blank", "val/length_ratio", "val/distinct"} <= set(events.Tags()["scalars"])


def shown(lines, folder, show, results, remark=""):
    """Has the samples of an evaluation shown."""
    evaluation = SimpleNamespace(samples=[{"line": line} for line in lines], results=results)
    trainer = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=3, default_root_dir=str(folder))
    trainer.loggers = []
    Samples(show=show, keep=0).on_validation_end(trainer, SimpleNamespace(evaluation=evaluation, remark=remark))


@pytest.mark.parametrize(
    ("count", "show", "places"), [(8, 4, [0, 2, 4, 6]), (9, 4, [0, 2, 4, 6]), (3, 4, [0, 1, 2]), (5, 0, [])]
)
def test_samples_are_shown_from_all_over_an_evaluation(count, show, places, tmp_path, capsys):
    """Those of class folders stand class by class."""
    shown([f"sample {n}" for n in range(count)], tmp_path, show, {"val/loss": 1.0}, "by x")
    lines = capsys.readouterr().out.split("\n")
    assert lines == ["", "step 3: loss 1.0000", "  (by x)", *(f"  sample {n}" for n in places), ""]


def test_samples_send_no_commands_to_a_terminal(tmp_path, capsys):
    shown(["a\x1b[2J\0 b"], tmp_path, 1, {})
    assert capsys.readouterr().out.endswith("  a\\x1b[2J\\x00 b\n")

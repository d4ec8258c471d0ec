"""Captions with their images, references and losses at each validation: in samples/, and in TensorBoard."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from vlm.cli.main import run as vlm
from vlm.training.callbacks.loggers import FaultTolerantLogger
from vlm.training.callbacks.progress import Samples
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


def run_validation(lines, folder, results, remark="", headlines=(), **options):
    """Has the callback see one validation with these samples and the end of a training; returns it."""
    evaluation = SimpleNamespace(samples=[{"line": line} for line in lines], results=results)
    trainer = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=3, default_root_dir=str(folder))
    trainer.loggers = []
    task = SimpleNamespace(evaluation=evaluation, remark=remark, headlines=headlines)
    callback = Samples(keep=0, **options)
    for _ in range(2):
        callback.on_validation_end(trainer, task)
    callback.on_train_end(trainer, task)


SCORES = {"val/loss": 1.0, "val/loss@blank": 2.0, "val/wer": 0.5, "val/bleu": 30.25}


@pytest.mark.parametrize(
    ("count", "show", "places"), [(8, 4, [0, 2, 4, 6]), (9, 4, [0, 2, 4, 6]), (3, 4, [0, 1, 2]), (5, 0, [])]
)
def test_a_validation_is_a_line_and_the_last_ones_samples_follow(count, show, places, tmp_path, capsys):
    """Samples are from all over the evaluation: those of class folders are sorted by class."""
    samples = [f"sample {n}" for n in range(count)]
    run_validation(samples, tmp_path, SCORES, "by x", ["bleu", "chrf"], show=show)
    lines = capsys.readouterr().out.split("\n")
    line = "step 3: loss 1.0000  bleu 30.2500  loss@blank 2.0000  wer 0.5000"
    assert lines[:3] == [line, line, ""]
    assert lines[3:] == ["samples of the last validation", "(by x)", *(f"  sample {n}" for n in places), ""]


def test_the_lines_of_a_sample_are_indented_and_the_mark_of_right_ones_is_explained(tmp_path, capsys):
    """Questions about one image ran on in one folded line, and nothing said what = means."""
    run_validation(["what? red (right)\nhow many? one (true: two)"], tmp_path, {}, show=1)
    assert capsys.readouterr().out.endswith(
        "\nsamples of the last validation\n  what? red (right)\n    how many? one (true: two)\n"
    )
    run_validation(["= 'a dog'", "  'a cat'"], tmp_path, {}, show=2)
    said = capsys.readouterr().out
    assert said.endswith("samples of the last validation (= marks correct ones)\n  = 'a dog'\n    'a cat'\n")


def test_samples_of_every_validation_are_shown_where_that_is_asked(tmp_path, capsys):
    run_validation(["one"], tmp_path, {"val/loss": 1.0}, show=1, every_validation=True)
    assert capsys.readouterr().out == "step 3: loss 1.0000\n  one\n" * 2


@pytest.mark.parametrize(("width", "names"), [(40, ["loss", "bleu"]), (60, ["loss", "bleu", "loss@blank"])])
def test_a_terminal_gets_the_main_scores_that_fit_in_its_line(width, names, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    run_validation([], tmp_path, SCORES, headlines=["bleu"], show=1)
    first, *_ = capsys.readouterr().out.splitlines()
    assert len(first) < width and first.split()[2::2] == names


def test_samples_send_no_commands_to_a_terminal(tmp_path, capsys):
    run_validation(["a\x1b[2J\0 b"], tmp_path, {}, show=1)
    assert capsys.readouterr().out.endswith("  a\\x1b[2J\\x00 b\n")

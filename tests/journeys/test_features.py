"""Training on the features of a frozen encoder, as a user asks for it."""

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from journey import interrupt_at, results, same_weights

from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm
from vlm.data.shapes.scene_source import GeneratedSplit
from vlm.training.run.fit import main

ROOT = Path(__file__).parents[2]
SAME = ["data.train_samples=48", "task.freeze=[encoder]", "model.size.dropout=0.1"]
KEPT = [*SAME, "data.cache_features=true"]
TIMM = ["model/encoder=timm", "model.encoder.name=resnet18"]


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) for name in ("train/loss", "val/loss") if row[name]]


def train(overrides: list[str], runs: Path, name: str) -> Path:
    assert main([*overrides, f"runs={runs}", f"name={name}"]) == 0
    return next((runs / name).glob("20*"))


@pytest.mark.slow
def test_training_is_what_it_is_without(small, tmp_path, monkeypatch, capsys) -> None:
    options = [*small, "trainer.precision=32-true", "trainer.max_epochs=1", "data.batch_size=12"]
    options += ["task.max_tokens=3", "task.val_captions=4"]
    plain = train([*options, *SAME], tmp_path, "plain")
    kept = train([*options, *KEPT], tmp_path, "kept")
    assert "features    48 images x 64 x 32 float32" in capsys.readouterr().out
    assert losses(kept) == pytest.approx(losses(plain), rel=1e-6)  # to the rounding of sums in another order
    scores = [results(run / "evaluation" / "test") for run in (kept, plain)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    drawn, plain = [], GeneratedSplit.record

    def record(split, *key):
        one = plain(split, *key)
        draw = one.open_image
        one.open_image = lambda: (drawn.append(split.name), draw())[1]
        return one

    monkeypatch.setattr(GeneratedSplit, "record", record)
    again = train([*options, *KEPT], tmp_path, "again")
    assert losses(again) == losses(kept) and "val" in drawn and "train" not in drawn
    assert len(list((tmp_path / "cache").glob("*.features"))) == 1


def test_what_cannot_be_kept_is_refused_in_a_line(small, tmp_path, capsys) -> None:
    assert main([*small, "data.cache_features=true", "task.freeze=[encoder]", f"runs={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "new images in every epoch" in said and len(said.splitlines()) == 1 and not list(tmp_path.glob("*/20*"))


@pytest.mark.slow
def test_the_backbone_of_timm_with_a_projection_that_learns(small, tmp_path) -> None:
    """Whose normalisation by batches must keep its statistics."""
    options = [*small, *TIMM, "trainer.max_epochs=2", "data.batch_size=12", "callbacks=ema"]
    freeze = ["task.freeze=[encoder.backbone]"]
    plain = train([*options, *SAME, *freeze], tmp_path, "plain")
    kept = train([*options, *KEPT, *freeze], tmp_path, "kept")
    assert losses(kept) == pytest.approx(losses(plain), rel=1e-5)
    first, last = (ckpt.read(run / "checkpoints/last.ckpt")["state_dict"] for run in (plain, kept))
    fixed = [name for name in first if "encoder.backbone" in name]
    assert fixed and all(torch.equal(first[name], last[name]) for name in fixed)
    assert not any("tracked" in name and first[name] for name in fixed)
    other = [*options, *KEPT, *freeze, "model.size.dim=48", "model.size.num_heads=3"]
    train(other, tmp_path, "wider")
    assert len(list((tmp_path / "cache").glob("*.features"))) == 1


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("workers", [2, 0])
def test_a_run_that_was_stopped_goes_on_with_them(small, workers, tmp_path, monkeypatch, capsys) -> None:
    options = [*small, *KEPT, "trainer.max_epochs=3", f"data.num_workers={workers}"]
    whole = train(options, tmp_path / "whole", "whole")
    with monkeypatch.context() as patch:
        interrupt_at(8, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'cut'}", "name=cut"]) == 143
    folder = next((tmp_path / "cut/cut").glob("20*"))
    capsys.readouterr()
    assert main([f"resume={folder}"]) == 0
    assert "48 are in" in capsys.readouterr().out
    assert same_weights(folder / "checkpoints/last.ckpt", whole / "checkpoints/last.ckpt")
    best = str(folder / "checkpoints/best.ckpt")
    for left in (tmp_path / "cut/cache").glob("*.features"):
        left.unlink()
    assert vlm(["evaluate", "-c", best, "--split", "val", "--device", "cpu"]) == 0
    assert vlm(["caption", str(folder / "samples/example.png"), "-c", best, "--device", "cpu"]) == 0
    assert not list((tmp_path / "cut/cache").glob("*.features"))


@pytest.mark.slow
def test_features_are_of_the_weights_that_the_run_has(small, tmp_path, monkeypatch) -> None:
    """A resumed run builds its model anew; what it started from need not be there any more."""
    options = [*small, *KEPT, "trainer.max_epochs=1"]
    from vlm.training.run import run

    def start(model, config, tokenizer):
        with torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter.mul_(1.5)

    with monkeypatch.context() as patch:
        patch.setattr(run, "load_initial_weights", start)
        folder = train(options, tmp_path, "started")
    assert main([f"resume={folder}", "trainer.max_epochs=2"]) == 0
    assert len(list((tmp_path / "cache").glob("*.features"))) == 1


@pytest.mark.slow
def test_two_processes_read_what_the_first_made(small, tmp_path) -> None:
    options = [*small, *KEPT, "model.size.dropout=0", "trainer.max_epochs=1"]
    one = train(options, tmp_path / "one", "one")
    command = [sys.executable, str(ROOT / "train.py"), *options, f"runs={tmp_path / 'two'}", "trainer=ddp"]
    command += ["trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.devices=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("features    48 images") == 1 and "0 are in" in done.stdout
    assert losses(next((tmp_path / "two").glob("*/20*"))) == pytest.approx(losses(one), abs=1e-5)
    assert len(list((tmp_path / "two/cache").glob("*.features"))) == 1

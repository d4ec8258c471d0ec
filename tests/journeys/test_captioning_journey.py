"""From training to captions, as a user goes."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from journey import best, only_run, results

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.stored import thaw
from vlm.cli.main import run as vlm
from vlm.training.run.build import build_model
from vlm.training.run.fit import main


@pytest.fixture
def checkpoint(trained: Path) -> str:
    return best(trained)


@pytest.mark.slow
def test_the_batch_size_changes_no_control(checkpoint: str, tmp_path: Path) -> None:
    scores = []
    for size in ("3", "16"):
        out = ["--out", str(tmp_path / size), "--batch-size", size]
        assert vlm(["evaluate", "-c", checkpoint, *out, "--device", "cpu"]) == 0
        scores.append(results(tmp_path / size))
    for name in ("test/loss", "test/loss@shuffled", "test/loss@blank"):
        assert scores[0][name] == pytest.approx(scores[1][name], abs=2e-6), name
    assert scores[0]["test/loss@shuffled"] != scores[0]["test/loss"]


def test_what_cannot_be_evaluated_is_refused_before_the_evaluation(checkpoint: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("vlm.training.run.run.evaluate_split", None)
    assert vlm(["evaluate", "-c", checkpoint, "--split", "validation"]) == 2
    assert "--split: 'validation' is unknown; choose train, val or test" in capsys.readouterr().err
    before = Path(checkpoint).read_bytes()
    for out in ("/dev/null/out", checkpoint):
        assert vlm(["evaluate", "-c", checkpoint, "--out", out, "--device", "cpu"]) == 2
        assert f"error: --out {out}: cannot be written" in capsys.readouterr().err
    assert Path(checkpoint).read_bytes() == before


def test_the_evaluated_captions_are_those_of_vlm_caption(trained: Path, checkpoint: str, capsys) -> None:
    predictions = results(trained / "evaluation" / "test", "predictions")
    example = str(trained / "samples" / "example.png")
    assert vlm(["caption", example, "-c", checkpoint, "--device", "cpu", "--precision", "fp32"]) == 0
    path, caption = capsys.readouterr().out.rstrip("\n").split("\t")
    assert path == example
    assert caption == next(p["caption"] for p in predictions if p["image_id"] == "test-0-000000")


def test_a_bad_image_is_named_and_the_others_are_captioned(checkpoint: str, photos: Path, tmp_path, capsys) -> None:
    bad, good = tmp_path / "bad.png", str(sorted(photos.glob("*.png"))[0])
    bad.write_bytes(b"no image")
    assert vlm(["caption", str(bad), good, str(tmp_path / "none.png"), "-c", checkpoint, "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{good}\t") and len(captured.out.splitlines()) == 1
    assert f"error: {bad}: " in captured.err and f"error: {tmp_path / 'none.png'}: " in captured.err


@pytest.mark.slow
def test_the_audit_shows_the_shift_and_the_end_token(small: list[str], tmp_path: Path, capsys) -> None:
    assert main([*small, "debug=fast", "tokenizer=char", f"runs={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "parameters" in said and "padding" in said
    rows = [line.partition("1   ")[2] for line in said.splitlines() if line.strip().startswith("1   ")]
    assert rows[0].startswith("'<s>' -> 'a'") and rows[1].startswith("'a' -> ")
    for before, after in pairwise(rows):
        assert before.split(" -> ")[1] == after.split(" -> ")[0]  # each target is the next input


@pytest.mark.slow
def test_a_frozen_encoder_keeps_its_weights(small: list[str], tmp_path: Path) -> None:
    assert main([*small, "trainer.max_epochs=1", "task.freeze=[encoder]", f"runs={tmp_path}"]) == 0
    loaded = ckpt.read(only_run(tmp_path) / "checkpoints" / "last.ckpt")
    weights, config = ckpt.inference_weights(loaded), thaw(loaded["vlm"]["config"])
    fresh = build_model(config, {"vocab_size": weights["decoder.token_embed.weight"].shape[0]})[0].state_dict()
    same = {name: torch.equal(tensor, fresh[name]) for name, tensor in weights.items()}
    assert all(kept for name, kept in same.items() if name.startswith("encoder."))
    assert not any(kept for name, kept in same.items() if name.endswith("attn.qkv.weight") and "decoder" in name)

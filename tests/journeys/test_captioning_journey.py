"""From training to captions, as a user goes."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.stored import thaw
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main
from vlm.training.run.run import build_model

CAPTION_METRICS = {"loss", "bleu4", "cider", "rouge_l", "exact_match", "distinct"}


def test_a_run_leaves_its_folder_as_documented(trained: Path) -> None:
    assert (trained / "config.yaml").is_file()
    assert {path.name for path in (trained / "checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt"}
    rows = list(csv.DictReader((trained / "metrics.csv").open()))
    assert {"step", "epoch", "train/loss", "val/loss", "val/exact_match"} <= rows[0].keys()
    assert len(list((trained / "samples").glob("step_*.jsonl"))) == 2
    metrics = json.loads((trained / "evaluation" / "test" / "metrics.json").read_text())
    assert {f"test/{name}" for name in CAPTION_METRICS} <= metrics.keys()
    assert {"test/cider@constant", "test/cider@shuffled", "test/bleu4@constant"} <= metrics.keys()
    predictions = json.loads((trained / "evaluation" / "test" / "predictions.json").read_text())
    assert len(predictions) == 20 and predictions[0].keys() == {"image_id", "caption"}


def test_the_batch_size_changes_no_control(trained: Path, tmp_path: Path) -> None:
    best = str(trained / "checkpoints" / "best.ckpt")
    scores = []
    for size in ("3", "16"):
        assert (
            vlm(["evaluate", "-c", best, "--out", str(tmp_path / size), "--batch-size", size, "--device", "cpu"]) == 0
        )
        scores.append(json.loads((tmp_path / size / "metrics.json").read_text()))
    for name in ("test/loss", "test/loss@shuffled", "test/loss@blank"):
        assert scores[0][name] == pytest.approx(scores[1][name], abs=2e-6), name
    assert scores[0]["test/loss@shuffled"] != scores[0]["test/loss"]


def test_another_split_is_evaluated_by_name(trained: Path, capsys) -> None:
    best = str(trained / "checkpoints" / "best.ckpt")
    assert vlm(["evaluate", "-c", best, "--split", "val", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("val ")
    assert vlm(["evaluate", "-c", best, "--split", "validation"]) == 2
    assert "there is no split 'validation'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_evaluation(trained: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("vlm.training.run.run.evaluate", None)
    best = trained / "checkpoints" / "best.ckpt"
    before = best.read_bytes()
    for out in ("/dev/null/out", str(best)):
        assert vlm(["evaluate", "-c", str(best), "--out", out, "--device", "cpu"]) == 2
        assert f"error: --out {out}: cannot be written" in capsys.readouterr().err
    assert best.read_bytes() == before


def test_the_evaluated_captions_are_those_of_vlm_caption(trained: Path, tmp_path: Path, capsys) -> None:
    predictions = json.loads((trained / "evaluation" / "test" / "predictions.json").read_text())
    example, best = trained / "samples" / "example.png", str(trained / "checkpoints" / "best.ckpt")
    assert vlm(["caption", str(example), "-c", best, "--device", "cpu", "--precision", "fp32"]) == 0
    path, caption = capsys.readouterr().out.rstrip("\n").split("\t")
    assert path == str(example)
    assert caption == next(p["caption"] for p in predictions if p["image_id"] == "test-0-000000")


def test_captions_come_in_three_forms_and_do_not_depend_on_the_batch(
    trained: Path, photos: Path, tmp_path: Path
) -> None:
    found = {}
    for form, size in (("text", "1"), ("jsonl", "7"), ("csv", "30")):
        out = tmp_path / f"captions.{form}"
        arguments = [str(photos), "-c", str(trained / "checkpoints" / "last.ckpt"), "--device", "cpu"]
        assert vlm(["caption", *arguments, "--format", form, "--out", str(out), "--batch-size", size]) == 0
        lines = out.read_text().splitlines()
        if form == "text":
            found[form] = [tuple(line.split("\t")) for line in lines]
        elif form == "jsonl":
            records = [json.loads(line) for line in lines]
            assert all(record.keys() == {"image", "caption", "logprob", "confidence"} for record in records)
            assert all(record["logprob"] < 0 < record["confidence"] < 1 for record in records)
            found[form] = [(record["image"], record["caption"]) for record in records]
        else:
            found[form] = [(row["image"], row["caption"]) for row in csv.DictReader(lines)]
    assert len(found["text"]) == 30
    assert found["text"] == found["jsonl"] == found["csv"]


def test_a_bad_image_is_named_and_the_others_are_captioned(trained: Path, photos: Path, tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    good = str(sorted(photos.glob("*.png"))[0])
    checkpoint = str(trained / "checkpoints" / "best.ckpt")
    assert vlm(["caption", str(bad), good, str(tmp_path / "none.png"), "-c", checkpoint, "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{good}\t") and len(captured.out.splitlines()) == 1
    assert f"error: {bad}: " in captured.err and f"error: {tmp_path / 'none.png'}: " in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["caption", "x.png", "-c", "none.ckpt"], "none.ckpt: no such checkpoint"),
        (["caption", "EMPTY", "-c", "none.ckpt"], "no images found"),
        (["caption", "x.png"], "checkpoint"),
        (["caption", "x.png", "-c", "TEXT"], "is not a checkpoint"),
        (["info", "-c", "TEXT"], "is not a checkpoint"),
        (["evaluate", "-c", "TEXT"], "is not a checkpoint"),
        (["captoin"], "captoin"),
    ],
)
def test_wrong_usage_is_two_lines_and_status_2(arguments: list[str], said: str, tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.ckpt"
    text.write_text("not a checkpoint")
    places = {"EMPTY": str(tmp_path / "empty"), "TEXT": str(text)}
    (tmp_path / "empty").mkdir()
    assert vlm([places.get(argument, argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and said in captured.err
    assert len(captured.err.splitlines()) <= 2 and "Traceback" not in captured.err and captured.out == ""


def test_the_audit_shows_the_shift_and_the_end_token(small: list[str], tmp_path: Path, capsys) -> None:
    assert main([*small, "debug=fast", "tokenizer=char", f"runs={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "parameters" in said and "padding" in said
    rows = [line.partition("1   ")[2] for line in said.splitlines() if line.strip().startswith("1   ")]
    assert rows[0].startswith("'<s>' -> 'a'") and rows[1].startswith("'a' -> ")
    for before, after in pairwise(rows):
        assert before.split(" -> ")[1] == after.split(" -> ")[0]  # each target is the next input


def test_a_frozen_encoder_keeps_its_weights(small: list[str], tmp_path: Path) -> None:
    assert main([*small, "trainer.max_epochs=1", "task.freeze=[encoder]", f"runs={tmp_path}"]) == 0
    loaded = ckpt.read(next(tmp_path.glob("*/20*")) / "checkpoints" / "last.ckpt")
    weights, config = ckpt.weights(loaded), thaw(loaded["vlm"]["config"])
    fresh = build_model(config, {"vocab_size": weights["decoder.token_embed.weight"].shape[0]})[0].state_dict()
    same = {name: torch.equal(tensor, fresh[name]) for name, tensor in weights.items()}
    assert all(kept for name, kept in same.items() if name.startswith("encoder."))
    assert not any(kept for name, kept in same.items() if name.endswith("attn.qkv.weight") and "decoder" in name)

"""Minimal pairs: their tables, their scores, and the likelihoods of sentences against Hugging Face's GPT-2."""

import json
import re

import pytest
import torch
from hugging import saved_gpt2

from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.training.run.minimal_pairs import Pair, read_pairs, score_pairs

PAIRS = [("a man climbs a rock", "a man climb a rock"), ("two dogs run", "two dogs runs over"), ("a bird", "bird a")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pairs.csv", "kind,good,bad\nverb,a man climbs,a man climb\n,two dogs,two dog\n"),
        ("pairs.tsv", "bad\tgood\tKind\na man climb\ta man climbs\tverb\ntwo dog\ttwo dogs\t\n"),
        (
            "blimp.jsonl",  # as BLiMP's files are
            '{"sentence_good": "a man climbs", "sentence_bad": "a man climb", "UID": "verb", "pairID": 0}\n'
            '{"sentence_good": "two dogs", "sentence_bad": "two dog"}\n',
        ),
    ],
)
def test_tables_are_read(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert read_pairs(tmp_path / name) == [Pair("a man climbs", "a man climb", "verb"), Pair("two dogs", "two dog")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("good,bad\na,\n", "line 2: needs two different sentences"),
        ("good,bad\na b,a b\n", "line 2: needs two different sentences"),
        ("good,bad\n", "contains no pairs"),
        ("right,wrong\na,b\n", "no columns .* among 'right', 'wrong'; name them good and bad$"),
    ],
)
def test_tables_that_hold_no_pairs_are_refused(text, said, tmp_path):
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        read_pairs(tmp_path / "pairs.csv")


def test_scores_are_shares_of_all_and_of_each_kind():
    pairs = [Pair("a", "b", kind) for kind in ("x", "x", "", "y") * 5]
    scores = score_pairs(pairs, [1.0, 0.0, 2.0, -1.0] * 5)
    found = {kind: (score["accuracy"], score["pairs"]) for kind, score in scores.items()}
    assert found == {"": (0.5, 20), "x": (0.5, 10), "y": (0.0, 5)}
    assert 0.2 < scores[""]["accuracy@low"] < 0.5 < scores[""]["accuracy@high"] < 0.8


def test_likelihoods_are_those_of_hugging_face(tmp_path, capsys):
    model, tokenizer = saved_gpt2(tmp_path / "gpt2")
    (tmp_path / "pairs.csv").write_text("good,bad\n" + "".join(f"{good},{bad}\n" for good, bad in PAIRS))
    command = ["evaluate", "-c", str(tmp_path / "gpt2"), "--pairs", str(tmp_path / "pairs.csv")]
    assert vlm([*command, "--out", str(tmp_path / "out"), "--batch-size", "4"]) == 0
    rows = json.loads((tmp_path / "out/predictions.json").read_text())
    truth = []
    for text in (text for pair in PAIRS for text in pair):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            chances = model(ids).logits.log_softmax(-1)[0, :-1]
        truth.append(chances.gather(1, ids[0, 1:, None]).sum().item())
    found = [row[f"{side}_logprob"] for row in rows for side in ("good", "bad")]
    assert found == pytest.approx(truth, rel=1e-5)
    accuracy = sum(good > bad for good, bad in zip(truth[::2], truth[1::2], strict=True)) / 3
    assert json.loads((tmp_path / "out/metrics.json").read_text())["pairs/accuracy"] == pytest.approx(accuracy)
    said = capsys.readouterr().out
    assert f"all         3    {accuracy:.4f}" in said
    verdict, _, advice = " ".join(said[said.index("\nverdict") :].split()).partition(" to try next: ")
    assert re.fullmatch(r"verdict too few .* chance: accuracy [0-9.]+ against 0.5000, on 3 pairs", verdict)
    assert advice == "evaluate at least 10 samples" and max(map(len, said.splitlines()[-3:])) <= 80
    assert (tmp_path / "out/report.html").is_file()


def test_what_cannot_be_scored_is_refused(tmp_path, capsys):
    saved_gpt2(tmp_path / "gpt2")
    (tmp_path / "pairs.csv").write_text(f"good,bad\n{'a dog ' * 200},a dog\n")
    command = ["evaluate", "-c", str(tmp_path / "gpt2"), "--pairs", str(tmp_path / "pairs.csv")]
    assert vlm(command) == 2
    assert "is longer than the" in capsys.readouterr().err
    assert vlm([*command, "data=text"]) == 2
    assert "--pairs: replaces the data set" in capsys.readouterr().err
    assert vlm([*command[:2], "data/sample/captioner.ckpt", *command[3:]]) == 2
    assert "is a model for captioning; --pairs needs a language model" in capsys.readouterr().err

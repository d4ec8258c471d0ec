"""From training to text, as a user goes."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from journey import best, only_run, results
from torch.nn.functional import cross_entropy

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.stored import thaw
from vlm.cli.main import run as vlm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.models.decoder import Decoder
from vlm.training.run.build import build_data
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow

CPU = ["--device", "cpu"]
EXACT = [*CPU, "--precision", "fp32"]
PROMPTS = ["A", "A large red", "The small green triangle right of the circle is above a", ""]


def ask(prompts: list[str]) -> list[str]:
    return [part for prompt in prompts for part in ("--prompt", prompt)]


@pytest.fixture
def write(trained_text: Path, capsys):
    """Runs `vlm generate` and returns its records."""

    def run(*options: str, prompts: list[str] = PROMPTS) -> list[dict]:
        arguments = [*ask(prompts), "-c", best(trained_text), *EXACT, "--max-tokens", "20"]
        assert vlm(["generate", *arguments, "--format", "jsonl", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_the_figures_are_those_of_the_text(trained_text: Path) -> None:
    metrics = results(trained_text / "evaluation" / "test")
    source = build_data(thaw(ckpt.read(best(trained_text))["vlm"]["config"])).source
    documents = ["".join(record["document"].lines()) for record in source.split("test").records()]
    text = "".join(documents)
    assert len(documents) == 4 and text.isascii()
    nats = metrics["test/loss"] * (len(text) + len(documents))  # each character, and each document's end
    assert metrics["test/perplexity"] == pytest.approx(math.exp(metrics["test/loss"]))
    assert metrics["test/bits_per_byte"] == pytest.approx(nats / len(text) / math.log(2))
    assert metrics["test/word_perplexity"] == pytest.approx(math.exp(nats / len(text.split())))
    # The estimate is of a few windows: near the loss of the whole split, and not it.
    assert 0 < abs(metrics["test/loss@sampled"] - metrics["test/loss"]) < 0.3


def test_three_forms_hold_the_same_text(write, trained_text: Path, tmp_path: Path, capsys) -> None:
    records = write()
    assert all(record.keys() == {"prompt", "text", "logprob"} and record["logprob"] < 0 for record in records)
    assert [record["prompt"] for record in records] == PROMPTS and all(record["text"] for record in records)
    arguments = ["generate", *ask(PROMPTS), "-c", best(trained_text), *EXACT, "--max-tokens", "20"]
    assert vlm([*arguments, "--format", "csv", "--out", str(tmp_path / "out.csv")]) == 0
    rows = csv.DictReader((tmp_path / "out.csv").open(newline=""))
    assert [{**row, "logprob": float(row["logprob"])} for row in rows] == records
    assert vlm([*arguments, "--out", str(tmp_path / "out.txt")]) == 0
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == PROMPTS
    assert vlm(arguments) == 0
    shown = "\n---\n".join(record["prompt"] + record["text"] for record in records) + "\n"
    harmless = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in shown)
    assert capsys.readouterr().out == "".join(harmless)


def test_text_goes_out_as_it_comes(trained_text: Path, monkeypatch, capsys) -> None:
    happened: list[str] = []
    step, put = Decoder.step, sys.stdout.write
    monkeypatch.setattr(Decoder, "step", lambda *args, **kwargs: happened.append("step") or step(*args, **kwargs))
    monkeypatch.setattr(sys.stdout, "write", lambda text: (text and happened.append(text)) or put(text))
    assert vlm(["generate", "--prompt", "A red", "-c", best(trained_text), *EXACT, "--max-tokens", "6"]) == 0
    assert happened[0] == "A red"
    for place, event in enumerate(happened[1:-2], start=1):
        assert (event == "step") == (place % 2 == 1)  # what a step drew is written before the next one
    assert happened.count("step") == 6
    assert "".join(event for event in happened if event != "step") == capsys.readouterr().out


def test_prompts_come_from_stdin(write, trained_text: Path, monkeypatch, capsys) -> None:
    expected = write(prompts=PROMPTS[:3])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(PROMPTS[:3]) + "\n"))
    options = ["-c", best(trained_text), *EXACT, "--max-tokens", "20", "--format", "jsonl"]
    assert vlm(["generate", *options]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert vlm(["generate", *options]) == 2
    assert "--prompt TEXT" in capsys.readouterr().err


def test_greedy_takes_the_likeliest_token_as_an_uncached_model_finds_it(write, trained_text: Path) -> None:
    (record,) = write("--greedy", prompts=["A large "])
    assert write("--greedy", "--seed", "5", prompts=["A large "]) == [record]
    loaded = ckpt.read(best(trained_text))
    model, tokenizer = ckpt.load_model(loaded), tokenizer_from_state(loaded["vlm"]["tokenizer"])
    ids, logprob = tokenizer.encode("A large "), 0.0
    with torch.inference_mode():
        for _ in range(20):
            logprobs = model.head(model(torch.tensor([ids])))[0, -1].log_softmax(-1)
            ids.append(int(logprobs.argmax()))
            logprob += logprobs.max().item()
            if ids[-1] == tokenizer.eos_id:
                break
    assert "A large " + record["text"] == tokenizer.decode(ids)
    assert record["logprob"] == pytest.approx(logprob, abs=1e-3)


def test_the_seed_decides_the_text_and_a_wrong_value_is_named(write, trained_text: Path, capsys) -> None:
    first, other = write("--seed", "1"), write("--seed", "2")
    assert write("--seed", "1") == first
    assert all(a["text"] != b["text"] for a, b in zip(first, other, strict=True))
    for wrong in ("--temperature -1", "--temperature nan", "--top-k -2", "--top-p 1.5", "--min-p 2", "--top-k many"):
        assert vlm(["generate", "--prompt", "A", "-c", best(trained_text), *wrong.split()]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and wrong.split()[0] in captured.err
        assert len(captured.err.splitlines()) <= 2 and captured.out == ""


TEXT = "Grüße aus 東京 — the quick brown fox\njumps over the lazy dog.\n" * 12
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("char", "sentencepiece")]


@pytest.mark.parametrize("tokenizer", ["bytes", *OTHERS])
def test_a_model_of_ones_own_text(tokenizer: str, small_text: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    common = [value for value in small_text if not value.startswith("data.source.")]
    own = ["data=text", f"data.path={tmp_path / 'mine.txt'}", f"tokenizer={tokenizer}", "data.max_len=96"]
    # A rate of zero leaves the model as it began.
    untrained = ["optim.lr=0", "trainer.max_steps=1", f"runs={tmp_path / 'runs'}"]
    assert main([*common, *own, *untrained]) == 0
    assert "\nval " in capsys.readouterr().out
    run = only_run(tmp_path / "runs")
    loaded = ckpt.read(best(run))
    model, read = ckpt.load_model(loaded), tokenizer_from_state(loaded["vlm"]["tokenizer"])
    metrics = results(run / "evaluation" / "val")
    assert metrics["val/loss"] == pytest.approx(math.log(read.vocab_size), rel=0.03)
    held = TEXT[int(len(TEXT) * 0.9) :]  # the last tenth of the characters, as one document
    ids = torch.tensor([[read.bos_id, *read.encode(held), read.eos_id]])
    assert ids.shape[1] <= 97
    with torch.inference_mode():
        logits = model.head(model(ids[:, :-1]))
    assert metrics["val/loss"] == pytest.approx(cross_entropy(logits[0], ids[0, 1:]).item(), rel=1e-5)
    size = len(held.encode())
    if tokenizer == "bytes":
        assert read.vocab_size == 256 + 3 and ids.shape[1] == size + 2
        # The document's end is a token and no byte.
        bits = metrics["val/loss"] / math.log(2) * (size + 1) / size
        assert metrics["val/bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert vlm(["generate", "--prompt", "Grüße", "-c", best(run), *EXACT, "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("Grüße")


def test_a_search_writes_ranked_texts_under_rules(write) -> None:
    rows = write("--beam", "3", "--results", "2", "--no-repeat-ngram", "3", "--min-tokens", "4", prompts=PROMPTS[:2])
    assert [(row["prompt"], row["rank"]) for row in rows] == [(p, rank) for p in PROMPTS[:2] for rank in (1, 2)]
    assert all(row["logprob"] < 0 for row in rows)
    assert not any("e" in row["text"] for row in write("--greedy", "--ban", "e", prompts=PROMPTS[:1]))

"""From tables of text to classes and tags, as a user goes."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from journey import best, only_run, results
from small import COMMON, command

from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

pytestmark = pytest.mark.slow

CPU = ["--device", "cpu"]
SMALL = [*COMMON, "model.size.dim=32", "model.size.num_heads=2", "model.size.encoder_depth=1"]
SMALL += ["trainer.precision=32-true", "optim.lr=1e-2", "tokenizer=char", "schedule.warmup=1"]
SMALL = [text for text in SMALL if not text.startswith(("callbacks=ema", "callbacks.ema"))]
GOOD, BAD = ("a fine film", "fine and warm", "warm fun"), ("a dull film", "dull and cold", "cold bore")


def train(options: list[str], runs: Path) -> Path:
    assert main([*SMALL, *options, f"runs={runs}"]) == 0
    return only_run(runs)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences without a header, their class first, as SST-2 has them."""
    path = tmp_path_factory.mktemp("table") / "reviews.train"
    lines = [f"{label} {text} {n}" for n in range(20) for label, texts in enumerate((BAD, GOOD)) for text in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def classified(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = ["task=text_classification", "data=texts", f"data.path={table}", "data.source.columns=[label,text]"]
    own += ["data.source.delimiter=' '", "data.batch_tokens=200", "trainer.max_epochs=6"]
    return train(own, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of two words in CoNLL-U, one of them longer than a row."""
    folder = tmp_path_factory.mktemp("treebank")
    row = lambda n, word, kind, tag: f"{n}\t{word}\t_\t{kind}\t{tag}" + "\t_" * 5 + "\n"  # noqa: E731
    lines = [row(1, word, "DET", f"B-{word}") + row(2, n, "NUM", "O") for n in range(30) for word in "ab"]
    long = "".join(row(n, f"a{n}", "X", "O") for n in range(1, 20))
    (folder / "train.conllu").write_text("\n".join([*lines, long]))
    (folder / "test.conllu").write_text("\n".join([long, *lines[:9]]))
    return folder


@pytest.fixture(scope="module")
def tagged(treebank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = ["task=tagging", "data=conllu", "data.source.tag_column=XPOS", "data.max_len=16", "trainer.max_epochs=6"]
    paths = [f"data.path={treebank}/train.conllu", f"data.test_path={treebank}/test.conllu"]
    return train([*own, *paths], tmp_path_factory.mktemp("runs"))


def read_scores(run: Path, name: str = "metrics") -> Any:
    return results(run / "evaluation" / "test", name)


def test_a_table_of_sentences_is_learnt_and_reported(classified: Path) -> None:
    metrics = read_scores(classified)
    assert metrics["test/accuracy"] > 0.9 and metrics["test/accuracy@bag"] == 1.0
    expected = {"loss", "accuracy", "balanced_accuracy", "calibration_error", "f1"}
    expected |= {"accuracy@constant", "accuracy@bag", "accuracy@low", "accuracy@high"}
    assert metrics.keys() == {f"test/{name}" for name in expected}
    predictions, details = read_scores(classified, "predictions"), read_scores(classified, "details")
    assert {"id", "text", "label", "predicted", "probability", "top"} == predictions[0].keys()
    of_class = [(each["label"], each["predicted"]) for each in predictions]
    both, taken, true = of_class.count(("1", "1")), *([*side].count("1") for side in zip(*of_class, strict=True))
    assert details["f1"]["1"] == pytest.approx(2 * both / (taken + true))
    page = (classified / "evaluation" / "test" / "report.html").read_text()
    assert "bag of words" in page and "Random samples" in page and "<th>F1</th>" in page


@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
def test_texts_and_lines_of_stdin_are_classified(form, classified: Path, capsys, monkeypatch) -> None:
    command = ["classify", "-c", best(classified), "--format", form, *CPU]
    assert vlm([*command, "--text", "a fine film 7", "--text", "cold bore 3"]) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("a fine film 7\ncold bore 3\n"))
    assert vlm([*command, "--batch-size", "1"]) == 0
    alone, probability = capsys.readouterr().out, re.compile(r"0\.\d+")
    assert probability.sub("p", alone) == probability.sub("p", said)
    one, other = (list(map(float, probability.findall(text))) for text in (alone, said))
    assert one == pytest.approx(other, abs=1e-3)  # products of one row and of two may round otherwise
    lines = said.splitlines()
    if form == "text":
        assert lines[0].startswith("a fine film 7\t1 ") and lines[1].startswith("cold bore 3\t0 ")
    elif form == "jsonl":
        assert [json.loads(line)["class"] for line in lines] == ["1", "0"]
    else:
        assert lines[0] == "text,class,probability" and lines[1].startswith("a fine film 7,1,")


def test_wrong_usage_is_status_2(classified: Path, tagged: Path, capsys) -> None:
    for words, run, said in (
        (["classify", "--text", "x", "--pair", "y"], classified, "--pair: this model reads single texts"),
        (["classify", "."], classified, "IMAGES: not supported by a model for text_classification"),
        (["classify", "--text", "caf\udce9"], classified, "UTF-8"),
        (["classify", "--text", "x"], tagged, "for tagging, not for classification or contrastive or text_cl"),
        (["tag", "--text", "x"], classified, "use `vlm classify`"),
    ):
        assert vlm([*words, "-c", best(run), *CPU]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and said in captured.err and captured.out == ""


def test_words_are_tagged_and_none_is_lost(tagged: Path, capsys) -> None:
    metrics = read_scores(tagged)
    names = {"loss", "word_accuracy", "span_precision", "span_recall", "span_f1"}
    names |= {f"{name}@{end}" for name in ("word_accuracy", "span_f1") for end in ("low", "high")}
    of_control = {"word_accuracy", "span_precision", "span_recall", "span_f1"}
    names |= {f"{name}@{control}" for name in of_control for control in ("frequent", "constant")}
    assert metrics.keys() == {f"test/{name}" for name in names}
    assert metrics["test/word_accuracy"] > 0.9 and metrics["test/span_f1"] > 0.9
    long = next(each for each in read_scores(tagged, "predictions") if len(each["words"]) == 19)
    assert len(long["predicted"]) == len(long["tags"]) == 19  # its 80 characters are more than a row of 16
    texts = [part for text in ("a 7", "b 7", " ".join(long["words"])) for part in ("--text", text)]
    assert vlm(["tag", "-c", best(tagged), *texts, *CPU]) == 0
    *short, last = capsys.readouterr().out.splitlines()
    assert short == ["a/B-a 7/O", "b/B-b 7/O"] and len(last.split()) == 19


def test_check_data_finds_every_planted_fault_in_a_table(table: Path, tmp_path: Path, capsys) -> None:
    rows = [f"{'ab'[n % 2]}\ttext number {n}\t{'train' if n < 30 else 'test'}" for n in range(40)]
    rows += ["a\ttext number 2\ttest", "a\ttext number 4\ttrain", "b\ttext number 6\ttrain"]
    rows += [f"a\t{'long ' * 80}\ttrain"]
    rows += ["a\t \ttrain", "\tno label\ttrain", "a\t東京\ttest"]
    (tmp_path / "t.tsv").write_text("label\ttext\tsplit\n" + "\n".join(rows) + "\n", encoding="utf-8")
    data = ["task=text_classification", "data=texts", f"data.path={tmp_path / 't.tsv'}", "tokenizer=char"]
    assert vlm(["check-data", *data]) == 1
    said = capsys.readouterr().out
    faults = "SPOILS      text in two splits: 1|duplicate text: 2|one text in two classes: 1|over-long text: 1"
    faults += "|empty text: 1|sample without a label: 1|characters spelled in bytes|line 46: no text|classes     2"
    for fault in faults.split("|"):
        assert fault in said, fault
    assert "train: 30 = test: 31" not in said
    # One text in two splits spoils a table of any size.
    rows = [f"{'ab'[n % 2]},text number {n},{'train' if n < 200 else 'test'}" for n in range(299)]
    (tmp_path / "t.csv").write_text("\n".join(["label,text,split", *rows, "a,text number 2,test"]) + "\n")
    assert vlm(["check-data", "task=text_classification", "data=texts", f"data.path={tmp_path / 't.csv'}"]) == 1
    assert "SPOILS      text in two splits: 1 (0.3% of 300)" in capsys.readouterr().out


def test_check_data_looks_at_tags(treebank: Path, capsys) -> None:
    data = ["task=tagging", "data=conllu", f"data.path={treebank}/train.conllu"]
    test = f"data.test_path={treebank}/test.conllu"
    assert vlm(["check-data", *data, test, "data.source.tag_column=XPOS"]) == 1
    said = capsys.readouterr().out
    assert "SPOILS      sentence in two splits: 10" in said and "tags        3" in said
    other = treebank / "other.conllu"
    other.write_text("1\tz\t_\tNEW\tB-new\t_\t_\t_\t_\t_\n")
    assert vlm(["check-data", *data, f"data.test_path={other}"]) == 0  # a word of 140
    assert "tag that train lacks: 1" in capsys.readouterr().out


MASKED = ["data.max_len=96", "trainer.precision=32-true", "test=false"]


def test_a_classifier_starts_from_masked_words(tmp_path: Path, capsys) -> None:
    masked = command("masked_language_modeling", *MASKED, "trainer.max_epochs=1", f"runs={tmp_path / 'masked'}")
    assert main(masked) == 0
    run = only_run(tmp_path / "masked")
    start = ["tokenizer=pretrained", f"tokenizer.path={run}", f"model.encoder.init_from={run}"]  # words are learnt anew
    start += ["trainer.max_steps=2", "optim.lr=0.0", "callbacks.ema=null"]
    capsys.readouterr()
    assert main(command("text_classification", *MASKED, *start, f"runs={tmp_path / 'class'}")) == 0
    assert "another tokenizer" not in capsys.readouterr().out
    states = [read(best(run)), read(only_run(tmp_path / "class") / "checkpoints" / "last.ckpt")]
    learned, taken = (
        {name: tensor for name, tensor in state["state_dict"].items() if name.startswith("model.encoder.")}
        for state in states
    )
    assert taken.keys() == learned.keys() and len(taken) > 10
    same = {name for name, tensor in taken.items() if torch.equal(tensor, learned[name])}
    assert taken.keys() - same <= {"model.encoder.type_embed.weight"}

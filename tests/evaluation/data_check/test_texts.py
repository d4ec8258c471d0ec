"""Faults of texts with their translations, and of questions about passages."""

import json

import pytest

from vlm.cli.main import run as vlm
from vlm.data.records import ListSplit, Record
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.evaluation.data_check.faults import LIMITS, REMEDIES, Faults
from vlm.evaluation.data_check.texts import find_pair_faults

TRAIN = [("a dog", "ein Hund"), ("a cat sleeps under a tree", "@@"), ("a dog", "ein Hund"), ("a dog", "der Hund")]
TEST = [("a fox", "ein Fuchs"), ("a dog", "ein Hund"), ("x" * 40, "y" * 40)]


def split(name, pairs):
    known = [dict(zip(("text", "translation"), pair, strict=True)) for pair in pairs]
    return ListSplit(range(len(pairs)), lambda at, epoch: Record(f"{name}-{at + 1}", known[at]))


def find_faults(is_generated=False):
    faults = Faults()
    splits = {"train": split("train", TRAIN), "test": split("test", TEST)}
    find_pair_faults(splits, ByteTokenizer(), 40, faults, limit=None, is_generated=is_generated)
    return faults


def test_each_fault_is_named_with_its_pair():
    lines = find_faults().by_kind
    assert lines["duplicate pair"] == ["train: train-1 = train: train-3: a dog | ein Hund"]
    assert lines["pair in two splits"] == ["train: train-1 = test: test-2: a dog | ein Hund"]
    assert lines["pair of unlike lengths"] == ["train: train-2: 25 and 2 characters: a cat sleeps under a tree | @@"]
    assert [line.split(",")[0] for line in lines["over-long text"]] == ["test: test-3: 42 tokens"]
    assert set(find_faults().spoiling) >= {"pair in two splits", "duplicate pair"}


def test_sentences_that_are_drawn_may_come_again():
    assert "duplicate pair" not in find_faults(is_generated=True).by_kind


def test_each_kind_that_may_spoil_a_run_has_a_remedy():
    assert not LIMITS.keys() - REMEDIES.keys()


def write(path, contexts, answer):
    question = {"question": "what?", "answers": [answer]}
    paragraphs = [{"context": text, "qas": [{"id": f"{path.stem}{n}", **question}]} for n, text in enumerate(contexts)]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


@pytest.mark.slow
def test_a_check_names_answers_and_passages_at_fault(tmp_path, capsys):
    train, test = tmp_path / "train.json", tmp_path / "test.json"
    write(train, [f"a red circle, {n} of many" for n in range(40)], {"text": "ed circle", "answer_start": 3})
    write(test, ["a red circle, 7 of many", "a blue circle"], {"text": "a", "answer_start": 0})
    held = [f"data.path={train}", f"data.test_path={test}"]
    assert vlm(["check-data", "task=span_answering", "data=squad", *held]) == 1
    said = capsys.readouterr().out
    assert "questions   42; 0 without an answer" in said
    assert "SPOILS      context in two splits: 1 " in said and "test:test0: a red circle, 7 of many" in said
    assert "SPOILS      answer that does not consist of whole words: 40 " in said and "'ed circle'" in said
    assert "over-long" not in said


@pytest.mark.slow
def test_a_check_names_answers_that_are_not_in_their_context(tmp_path, capsys):
    train = tmp_path / "train.json"
    write(train, ["red", *(f"a red circle {n}" for n in range(30))], {"text": "a", "answer_start": 0})
    assert vlm(["check-data", "task=span_answering", "data=squad", f"data.path={train}"]) == 0  # training skips it too
    said = capsys.readouterr().out
    assert "skipped     answer not in its context: 1 (3.2% of 31)" in said
    assert "data[0].paragraphs[0].qas[0] (train0): the answer 'a' is not at 0" in said

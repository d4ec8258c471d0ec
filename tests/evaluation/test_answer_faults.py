"""Questions that a check of the data names: passages of two splits, answers that are no whole words."""

import json

from vlm.cli.main import run as vlm


def write(path, contexts, answer):
    question = {"question": "what?", "answers": [answer]}
    paragraphs = [{"context": text, "qas": [{"id": f"{path.stem}{n}", **question}]} for n, text in enumerate(contexts)]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def test_a_check_names_answers_and_passages_at_fault(tmp_path, capsys):
    train, test = tmp_path / "train.json", tmp_path / "test.json"
    write(train, [f"a red circle, {n} of many" for n in range(40)], {"text": "ed circle", "answer_start": 3})
    write(test, ["a red circle, 7 of many", "a blue circle"], {"text": "a", "answer_start": 0})
    held = [f"data.path={train}", f"data.test_path={test}"]
    assert vlm(["check-data", "task=span_answering", "data=squad", *held]) == 1
    said = capsys.readouterr().out
    assert "questions   42; 0 without an answer" in said
    assert "SPOILS      context in two splits: 1 " in said and "test:test0: a red circle, 7 of many" in said
    assert "SPOILS      answer that is no whole words: 40 " in said and "'ed circle'" in said
    assert "over-long" not in said


def test_a_check_names_answers_that_are_not_in_their_context(tmp_path, capsys):
    train = tmp_path / "train.json"
    write(train, ["red", *(f"a red circle {n}" for n in range(30))], {"text": "a", "answer_start": 0})
    assert vlm(["check-data", "task=span_answering", "data=squad", f"data.path={train}"]) == 0  # training skips it too
    said = capsys.readouterr().out
    assert "skipped     answer not in its context: 1 (3.2% of 31)" in said
    assert "data[0].paragraphs[0].qas[0] (train0): the answer 'a' is not at 0" in said

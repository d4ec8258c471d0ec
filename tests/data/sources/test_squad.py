"""Questions in SQuAD's JSON: good ones as they stand, bad ones named, passages in one split each."""

import json

import pytest
from caption_data import refusal

from vlm.data.sources.squad import Squad

CONTEXT = "Ein 🦊 läuft im Wald."  # the fox is one code point, two units of UTF-16, four bytes of UTF-8


def entry(id, question="what?", answers=(("läuft", 6),), **more):
    return {"id": id, "question": question, "answers": [{"text": t, "answer_start": s} for t, s in answers], **more}


def write(path, *paragraphs, context=CONTEXT):
    rows = [{"context": f"{context}{' ' * n}", "qas": qas} for n, qas in enumerate(paragraphs)]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": rows}]}), encoding="utf-8")
    return str(path)


def read_records(source, *names):
    return {
        record.id: dict(record.values) for name in names or source.splits for record in source.split(name).records()
    }


@pytest.fixture
def source(tmp_path):
    def make(*paragraphs, **options):
        options = {"val_fraction": 0.0, "test_fraction": 0.0} | options
        return Squad(path=write(tmp_path / "q.json", *paragraphs), **options)

    return make


def test_places_are_counted_in_code_points_and_a_question_may_have_no_answer(source):
    plausible = {"is_impossible": True, "plausible_answers": [{"text": "Wald", "answer_start": 15}]}
    found = read_records(source([entry("a", answers=[("🦊", 4), ("läuft", 6)]), entry("b", answers=[], **plausible)]))
    assert found["a"] == {"question": "what?", "context": CONTEXT, "answers": [("🦊", 4), ("läuft", 6)]}
    assert found["b"]["answers"] == []


@pytest.mark.parametrize(("mark", "answers"), [(False, 1), ("False", 1), ("true", 0), (0, 1), (1, 0), (None, 1)])
def test_marks_of_unanswerable_questions(source, mark, answers):
    """Some tools write is_impossible as text, of which every one but the empty one is true in Python."""
    found = read_records(source([entry("a", answers=[("läuft", 6)], is_impossible=mark), entry("b")]))
    assert len(found["a"]["answers"]) == answers


@pytest.mark.parametrize("mark", ["no", [], 2, 0.5])
def test_other_marks_of_unanswerable_questions_are_refused(source, mark):
    message = refusal(source, [entry("a"), entry("b", is_impossible=mark)])
    assert f"data[0].paragraphs[0].qas[1]: is_impossible {mark!r} is neither true nor false" in message


@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        (entry("x", answers=[("läuft", 7)]), "answer not in its context", "'läuft' is not at 7"),
        (entry("x", answers=[("läuft", 6), ("Wald", -5)]), "answer not in its context", "'Wald' is not at -5"),
        (entry("x", answers=[(" ", 3)]), "answer not in its context", "' ' is not at 3"),
        (entry("x", question=" "), "empty text", "no question"),
        (entry("x", answers=[]), "question without an answer", "no answer"),
        (entry("a"), "question without a unique id", "its id is repeated"),
    ],
)
def test_a_bad_question_is_named_and_left_out(source, bad, kind, reason):
    made = source([entry("a")], [entry("b"), bad])
    assert set(read_records(made)) == {"a", "b"}
    (line,) = made.skipped
    assert line.kind == kind and reason in line
    assert f"q.json, data[0].paragraphs[1].qas[1] ({bad['id']})" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        (r'{"data": "\udfff"}', r"not JSON (\udfff is half of a surrogate pair"),
        ("[]", "has no list data"),
        ('{"data": []}', "has no usable sample"),
    ],
)
def test_a_file_of_another_layout_is_refused(tmp_path, text, reason):
    (tmp_path / "q.json").write_text(text)
    assert reason in refusal(Squad, path=str(tmp_path / "q.json"))


def test_splits_are_drawn_by_passage(source):
    paragraphs = [[entry(f"{n}-{k}") for k in range(3)] for n in range(120)]
    made = source(*paragraphs, val_fraction=0.2, test_fraction=0.2)
    train, val, test = (
        {record["context"] for record in made.split(name).records()} for name in ("train", "val", "test")
    )
    assert len(train) + len(val) + len(test) == 120 and not train & (val | test) and not val & test
    assert 40 < len(train) < 100 and min(len(val), len(test)) > 8


def test_several_files_train_and_one_tests(tmp_path):
    thirty = [[entry(f"{k}")] for k in range(30)]
    paths = [write(tmp_path / f"{n}.json", *thirty, context=f"{CONTEXT}{n}") for n in "ab"]
    made = Squad(path=paths, test_path=write(tmp_path / "test.json", [entry("z")]), val_fraction=0.2)
    assert made.splits == ("train", "val", "test") and set(read_records(made, "test")) == {"test:z"}
    assert len(read_records(made, "train", "val")) == 60


def test_questions_of_several_files_with_the_same_ids_stay_apart(tmp_path):
    """A metric counts a sample once an id."""
    paths = [write(tmp_path / f"{n}.json", [entry("1", n), entry("2", n)], context=f"{CONTEXT}{n}") for n in "ab"]
    made = Squad(path=paths, val_fraction=0.0, test_fraction=0.0)
    found = {(id, one["question"]) for id, one in read_records(made).items()}
    assert found == {("1", "a"), ("2", "a"), ("1#2", "b"), ("2#2", "b")}


def test_answers_of_impossible_questions_are_counted(source):
    entries = [entry(str(number), is_impossible=number in (2, 3, 5)) for number in range(8)]
    entries.append(entry("8", answers=[], is_impossible=True))
    (note,) = source(entries).notes
    what = "3 questions marked is_impossible with answers (the first: data[0].paragraphs[0].qas[2] (2))"
    assert f"{what}; these answers are not used" in note

"""Questions and answers as rows of tokens: only answers and their ends are predicted."""

from vlm.data.records import Listed, Question, Record
from vlm.data.text.question_field import QuestionField
from vlm.data.text.tokenizer import CharTokenizer


def field(max_len=16):
    tokenizer = CharTokenizer().fit(["what? how many? red blue two"])
    return QuestionField(tokenizer=tokenizer, max_len=max_len)


def record(*questions):
    return Record("a", {"questions": [Question(text, answer) for text, answer in questions]})


def test_a_row_holds_each_question_before_its_answer():
    questions = field()
    samples = [record(("what?", "red"), ("how many?", "two")), record(("what?", "blue"))]
    split = questions.view("test", Listed(samples, lambda sample, epoch: sample), training=False)
    read = list(split.records())
    rows = questions.collate([questions.encode(one, None) for one in read])
    pieces = questions.tokenizer.piece
    begin, end = (pieces(id) for id in (questions.tokenizer.bos_id, questions.tokenizer.eos_id))
    written = "".join(pieces(id) for id in rows.tokens[0].tolist()).replace(begin, "[").replace(end, "]")
    assert written.replace("▁", " ") == "[what?red][how many?two]"
    assert rows.segments.tolist() == [[1] * 10 + [2] * 14, [1] * 11 + [0] * 13]
    assert "".join(".x"[flag] for flag in rows.scored[0].int().tolist()) == "......xxxx..........xxxx"
    assert "".join(map(pieces, rows.targets.labels.tolist())).replace(end, "]") == "red]two]blue]"
    # Each is predicted by the token before it: the first by the last of the question.
    assert rows.targets.places.tolist() == [5, 6, 7, 8, 19, 20, 21, 22, 24 + 5, 24 + 6, 24 + 7, 24 + 8, 24 + 9]
    assert rows.targets.count == 13 and rows.references[1] == [Question("what?", "blue")]
    # Beside each stands its partner, whose questions the control reads beside this image.
    assert (rows.places, rows.others.places) == ([0, 1], [1, 0])
    assert rows.others.tokens[0, :11].tolist() == rows.tokens[1, :11].tolist()
    assert questions.length(read[0]) == 24
    assert questions.collate([questions.encode(samples[0], (0, 0, 0))]).references == [[]]  # in training


def test_of_a_long_question_the_beginning_is_cut_and_the_answer_stays():
    questions = field(max_len=9)
    ids, own = questions.tokens(Question("how many?", "two"))
    assert questions.tokenizer.decode(ids) == "any?two" and len(ids) == 9
    assert questions.tokenizer.decode([id for id, mine in zip(ids, own, strict=True) if mine]) == "two"

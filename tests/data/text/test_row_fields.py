"""Captions, questions and conversations as rows of tokens: what is read, and what alone is predicted."""

from collections import Counter

import pytest
import torch

from vlm.data.records import ListSplit, Question, Record
from vlm.data.text.conversation import Turn
from vlm.data.text.conversation_field import ConversationField, QuestionField
from vlm.data.text.inputs import OneCaptionField
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer
from vlm.models.context import PLACE

TOKENIZER = CharTokenizer().fit(["what? how many? where? red blue two"])


def show(ids):
    """The text of tokens, with begins as [ and ends as ]."""
    signs = {TOKENIZER.bos_id: "[", TOKENIZER.eos_id: "]"}
    return "".join(signs.get(id) or TOKENIZER.piece(id) for id in ids).replace("▁", " ")


def record(*questions):
    return Record("a", {"questions": [Question(text, answer) for text, answer in questions]})


def test_a_row_holds_each_question_before_its_answer():
    questions = QuestionField(tokenizer=TOKENIZER, max_len=16)
    samples = [record(("what?", "red"), ("how many?", "two")), record(("what?", "blue"))]
    split = questions.view("test", ListSplit(samples, lambda sample, epoch: sample), training=False)
    read = list(split.records())
    rows = questions.collate([questions.encode(one, None) for one in read])
    assert show(rows.tokens[0].tolist()) == "[what?red][how many?two]"
    assert rows.segments.tolist() == [[1] * 10 + [2] * 14, [1] * 11 + [0] * 13]
    assert "".join(".x"[flag] for flag in rows.scored[0].int().tolist()) == "......xxxx..........xxxx"
    assert show(rows.targets.labels.tolist()) == "red]two]blue]"
    # Each is predicted by the token before it: the first by the last of the question.
    assert rows.targets.places.tolist() == [5, 6, 7, 8, 19, 20, 21, 22, 24 + 5, 24 + 6, 24 + 7, 24 + 8, 24 + 9]
    assert rows.targets.count == 13 and rows.references[1] == [Question("what?", "blue")]
    # Beside each stands its partner, whose questions the control reads beside this image.
    assert (rows.indices, rows.partners.indices) == ([0, 1], [1, 0])
    assert rows.partners.tokens[0, :11].tolist() == rows.tokens[1, :11].tolist()
    assert questions.length(read[0]) == 24
    assert questions.collate([questions.encode(samples[0], (0, 0, 0))]).references == [[]]  # in training


def test_of_a_long_question_the_beginning_is_cut_and_the_answer_stays():
    ids, own = QuestionField(tokenizer=TOKENIZER, max_len=9).tokens(Question("how many?", "two"))
    assert show(ids) == "[any?two]" and show([id for id, mine in zip(ids, own, strict=True) if mine]) == "two]"


FIRST, OTHER = Question("what?", "red"), Question("how?", "blue")
SECOND = Question("where?", "two", before=FIRST.turns)
RECORD = Record("a", {"questions": [FIRST, SECOND, OTHER]})


def conversation(max_len=99):
    return ConversationField(tokenizer=TOKENIZER, max_len=max_len)


def test_a_conversation_of_two_turns_is_one_segment():
    own = conversation()
    split = own.view("test", ListSplit([RECORD, RECORD], lambda sample, epoch: sample), training=False)
    rows = own.collate([own.encode(record, None) for record in split.records()])
    assert show(rows.tokens[0].tolist()) == "what?][red]where?][two]how?][blue]"
    assert rows.segments[0].tolist() == [1] * 23 + [2] * 11
    assert "".join(".x"[flag] for flag in rows.scored[0].int()) == ".......xxxx........xxxx......xxxxx"
    assert show(rows.targets.labels.tolist()) == "red]two]blue]" * 2
    assert torch.equal(rows.tokens.flatten()[rows.targets.places + 1], rows.targets.labels)
    assert rows.references[0] == [FIRST, SECOND, OTHER]  # each is answered


def test_the_row_is_what_a_chat_reads_after_the_image():
    own = conversation()
    own.states = 2
    form = PromptForm.of(own.state()["form"])
    turns = [Turn("user", "what?", places=(0,)), Turn("assistant", "red"), Turn("user", "where?")]
    prompt = form.conversation(own.tokenizer, turns).tokens
    assert prompt == [PLACE, PLACE, *own.prompt(SECOND, 99)]
    assert show(own.prompt(SECOND, 99)) == "what?][red]where?]["
    assert own.prompt(SECOND, 4) == own.prompt(SECOND, 99)[-4:]


def test_training_takes_as_many_as_fit_beside_the_images_and_counts_longer_ones():
    own = conversation(max_len=40)
    length = own.length(RECORD)
    assert length == 34
    assert len(own.encode(RECORD, (0, 0, 0)).texts) == 2
    own.states = 16  # of 40: room for 24
    kept = [own.encode(RECORD, (0, 0, place)).texts for place in range(20)]
    assert {len(texts) for texts in kept} == {1}
    assert {len(texts[0].tokens) for texts in kept} == {23, 11}  # another in another epoch
    assert own.truncated == 0
    own.states = 20
    cut = [own.encode(RECORD, (0, 0, place)).texts[0] for place in range(20)]
    assert {len(ids) for ids, _ in cut} == {20, 11} and own.truncated > 0


CAPTIONS = ["a red circle above a cross", "two shapes on a dark ground", "a cross", "shapes", "a circle and a cross"]


@pytest.fixture
def field():
    return OneCaptionField(tokenizer=ByteTokenizer(), max_len=40)


def record_of(id="r", captions=CAPTIONS):
    return Record(id, {"captions": captions[:2], "references": captions})


def read(field, row):
    return [field.tokenizer.decode(ids) for ids in row.texts]


def test_training_draws_one_caption_by_seed_epoch_and_id(field):
    def draw_rows(seed, id, index=7):
        return [read(field, field.encode(record_of(id), (seed, epoch, index))) for epoch in range(40)]

    found = {(seed, id): draw_rows(seed, id) for seed in range(2) for id in ("a", "b")}
    counts = Counter(text for epochs in found.values() for (text,) in epochs)
    assert set(counts) == set(CAPTIONS[:2]) and min(counts.values()) > 50
    assert found[0, "a"] != found[1, "a"] and found[0, "a"] != found[0, "b"]
    assert draw_rows(0, "a", index=8) == found[0, "a"]  # a row that is added before it changes nothing


def test_evaluation_reads_all_references_and_then_their_words_in_another_order(field):
    row = field.encode(record_of(), None)
    texts = read(field, row)
    assert row.references == CAPTIONS == texts[:5] and row == field.encode(record_of(), None)
    assert [Counter(text.split()) for text in texts[5:]] == [Counter(text.split()) for text in CAPTIONS]
    assert texts[5:7] != CAPTIONS[:2]


def test_a_batch_holds_the_place_of_each_captions_first_token(field):
    rows = [
        field.encode(record_of(captions=CAPTIONS[:2]), None),
        field.encode(record_of(captions=CAPTIONS[2:3]), None),
    ]
    batch = field.collate(rows)
    assert batch.counts == [4, 2] and batch.texts == [CAPTIONS[:2], CAPTIONS[2:3]]
    assert batch.tokens.flatten()[batch.places].tolist() == [field.tokenizer.bos_id] * 6
    assert batch.ids() == [ids for row in rows for ids in row.texts]
    assert len(field.collate([]).places) == 0
